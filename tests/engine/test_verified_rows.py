"""One pass over a token and a draft of what follows gives what one step after the other gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_model

from engine.batch import Chunk
from engine.config import EngineConfig
from engine.native.library import load
from engine.runner import ModelRunner
from protocol.layout import CacheDtype
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 4
PROMPT, DRAFT = list(range(20, 34)), [9, 4, 30, 9, 12, 7, 4, 4]
KERNELS = load()
native = pytest.mark.skipif(KERNELS is None, reason="no C++ compiler")
tiles = pytest.mark.skipif(KERNELS is None or not KERNELS.linear_kind, reason="no dot products of bfloat16")


@pytest.mark.parametrize(
    ("attention", "dtype", "exact"),
    [
        ("sdpa", "float32", False),
        pytest.param("native", "float32", False, marks=native),
        pytest.param("native", "bfloat16", True, marks=tiles),
    ],
)
@pytest.mark.parametrize(
    "family",
    [{}, {"family": "gemma2", "head_dim": 32, "sliding_window": 6, "attn_logit_softcapping": 5.0}],
    ids=["llama", "gemma2"],
)
def test_rows_of_one_pass_are_steps_of_their_own(
    family: dict[str, Any], attention: str, dtype: CacheDtype, exact: bool, tmp_path: Path
) -> None:
    tiny_model(tmp_path, hidden_size=192, num_attention_heads=6, num_key_value_heads=2, **family)
    runner = ModelRunner.load(
        EngineConfig(model=str(tmp_path), dtype=dtype, attention=attention, num_blocks=33, block_size=BLOCK, threads=1)
    )

    def rows(first_block: int) -> list[Chunk]:
        table = list(range(first_block, first_block + 6))
        runner.execute([Chunk(PROMPT, 0, table)])
        return [Chunk([token], len(PROMPT) + ahead, table, GREEDY) for ahead, token in enumerate(DRAFT)]

    apart = torch.cat([runner.logits([row]) for row in rows(1)])
    company = Chunk(DRAFT, 0, range(20, 22), GREEDY)
    together = runner.logits([*rows(10), company])[: len(DRAFT)]
    torch.testing.assert_close(together, apart, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4)
