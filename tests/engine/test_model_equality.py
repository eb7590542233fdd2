"""The paged forward pass equals transformers' on the same weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, edit_config, tiny_model
from transformers import AutoModelForCausalLM

from engine.batch import Chunk
from engine.config import EngineConfig
from engine.runner import ModelRunner
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "gqa2-tied": {"tie_word_embeddings": True},
    "gqa3": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
    "gqa8": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16},
    "head_dim": {"head_dim": 24},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "eps": {"rms_norm_eps": 1e-2},
    "mistral": {"family": "mistral", "head_dim": 32},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral-window": {"family": "mistral", "sliding_window": 13},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "qwen3-yarn": {
        "family": "qwen3",
        "head_dim": 16,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "attention_factor": 1.3,
            "truncate": False,
        },
    },
    "phi3": {"family": "phi3"},
    "phi3-partial": {
        "family": "phi3",
        "sliding_window": 11,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "phi3-longrope": {
        "family": "phi3",
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 128,
        },
    },
    "gemma2": {"family": "gemma2", "head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 24},
    "gemma2-caps": {
        "family": "gemma2",
        "head_dim": 16,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "sliding_window": 30,
    },
    "mixtral": {"family": "mixtral", "num_local_experts": 4},
    "mixtral-window": {
        "family": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 20,
    },
}


class Served:
    """A runner, and for each sequence its scattered blocks and how far it has come."""

    def __init__(self, path: Path, rng: random.Random, **settings: Any) -> None:
        self.runner = ModelRunner.load(
            EngineConfig(**{"model": str(path), "dtype": "float32", "threads": 1} | settings)
        )
        self.runner.cache.tensor.fill_(torch.nan)
        self.free = list(range(1, self.runner.num_blocks))
        rng.shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def chunk(self, sequence: int, tokens: list[int]) -> Chunk:
        table, start = self.tables.setdefault(sequence, []), self.lengths.get(sequence, 0)
        self.lengths[sequence] = start + len(tokens)
        while len(table) < self.runner.layout.blocks_for(start + len(tokens)):
            table.append(self.free.pop())
        return Chunk(tokens, start, list(table), GREEDY)


def reference_logits(path: Path, sequences: list[list[int]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What transformers computes of each sequence in one pass, [T, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.inference_mode():
        return [model(torch.tensor([sequence])).logits[0].float() for sequence in sequences]


def random_pieces(tokens: list[int], rng: random.Random) -> list[list[int]]:
    pieces = []
    while tokens:
        count = rng.choice((1, 1, 1, rng.randint(1, 9), rng.randint(1, 40)))
        pieces.append(tokens[:count])
        tokens = tokens[count:]
    return pieces


def worst_relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_for_random_chunks_blocks_and_batches(variant: str, tmp_path: Path) -> None:
    tiny_model(tmp_path, seed=3, **VARIANTS[variant])
    for block_size, order in ((4, "NHD"), (8, "HND"), (16, "NHD"), (16, "HND")):
        rng = random.Random(f"{variant} {block_size} {order}")
        served = Served(tmp_path, rng, block_size=block_size, order=order, num_blocks=640 // block_size)
        lengths = (1, block_size - 1, block_size, block_size + 1, 90, 70)
        sequences = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
        expected = reference_logits(tmp_path, sequences)
        pending = {index: random_pieces(sequence, rng) for index, sequence in enumerate(sequences)}
        while pending:
            chosen = rng.sample(sorted(pending), rng.randint(1, len(pending)))
            chunks = [served.chunk(index, pending[index].pop(0)) for index in chosen]
            wanted = torch.stack([expected[index][served.lengths[index] - 1] for index in chosen])
            assert worst_relative(served.runner.logits(chunks), wanted) < 1e-4
            pending = {index: pieces for index, pieces in pending.items() if pieces}


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_tokens_are_those_of_generate(tied: bool, tmp_path: Path) -> None:
    tiny_model(tmp_path, seed=5, tie_word_embeddings=tied)
    rng = random.Random(7)
    served = Served(tmp_path, rng, block_size=8, num_blocks=64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 7, 8, 9, 33)]
    draws = served.runner.execute([served.chunk(index, prompt) for index, prompt in enumerate(prompts)])
    texts = [[draw.token_id] for draw in draws if draw is not None]
    for _ in range(31):
        draws = served.runner.execute([served.chunk(index, text[-1:]) for index, text in enumerate(texts)])
        for text, draw in zip(texts, draws, strict=True):
            assert draw is not None
            text.append(draw.token_id)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, eos_token_id=None
        )
        assert text == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_within_its_rounding_of_the_exact_logits(dtype: str, tmp_path: Path) -> None:
    tiny_model(tmp_path, seed=2, num_attention_heads=6, num_key_value_heads=2, hidden_size=96, dtype=dtype)
    rng = random.Random(dtype)
    sequence = [rng.randrange(VOCAB_SIZE) for _ in range(60)]
    (exact,) = reference_logits(tmp_path, [sequence])
    (theirs,) = reference_logits(tmp_path, [sequence], getattr(torch, dtype))
    allowed = worst_relative(theirs, exact)
    served = Served(tmp_path, rng, dtype=dtype, num_blocks=16)
    rows = [served.runner.logits([served.chunk(0, sequence[:20])])]
    rows += [served.runner.logits([served.chunk(0, [token])]) for token in sequence[20:]]
    found = torch.cat(rows).float()
    # Its own rounding differs from transformers' by order of summation only: the error is of the same size.
    assert worst_relative(found, exact[19:]) < 2 * allowed < 0.2


def test_older_rope_fields_mean_the_same(tmp_path: Path) -> None:
    old, new = (
        tiny_model(tmp_path / "old", rope_parameters=LLAMA3),
        tiny_model(tmp_path / "new", rope_parameters=LLAMA3),
    )
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    edit_config(old, rope_parameters=None, rope_theta=LLAMA3["rope_theta"], rope_scaling=scaling)
    tokens = list(range(100))
    found = [Served(path, random.Random(0), num_blocks=9) for path in (old, new)]
    logits = [served.runner.logits([served.chunk(0, tokens)]) for served in found]
    assert torch.equal(*logits)
    plain = Served(tiny_model(tmp_path / "plain"), random.Random(0), num_blocks=9)
    assert not torch.allclose(plain.runner.logits([plain.chunk(0, tokens)]), logits[0], rtol=1e-2)


def test_sharded_checkpoint_gives_the_same_logits(tmp_path: Path) -> None:
    whole = tiny_model(tmp_path / "whole")
    parts = tiny_model(tmp_path / "parts", shard_size="60KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    logits = []
    for path in (whole, parts):
        served = Served(path, random.Random(1), num_blocks=4)
        logits.append(served.runner.logits([served.chunk(0, [3, 4, 5])]))
    assert torch.equal(*logits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("head_dim", [64, 48])
def test_logits_on_cuda_equal_those_of_transformers(order: str, head_dim: int, tmp_path: Path) -> None:
    tiny_model(tmp_path, num_attention_heads=6, num_key_value_heads=2, hidden_size=96, head_dim=head_dim)
    rng = random.Random(order)
    served = Served(tmp_path, rng, device="cuda", order=order, num_blocks=32)
    sequences = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (5, 40, 90)]
    expected = reference_logits(tmp_path, sequences)
    pending = {index: random_pieces(sequence, rng) for index, sequence in enumerate(sequences)}
    while pending:
        chosen = sorted(pending)
        chunks = [served.chunk(index, pending[index].pop(0)) for index in chosen]
        wanted = torch.stack([expected[index][served.lengths[index] - 1] for index in chosen])
        assert worst_relative(served.runner.logits(chunks).cpu(), wanted) < 1e-3
        pending = {index: pieces for index, pieces in pending.items() if pieces}
