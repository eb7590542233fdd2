"""Random-weight checkpoints for tests: small, quick to make, and with logits far from flat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCAB_SIZE = 272
"""256 bytes, the special tokens, and a few ids that no text gives."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}


def tiny_model(
    path: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    shard_size: str = "5GB",
    dtype: str = "float32",
    **overrides: Any,
) -> Path:
    """Write a random-weight checkpoint of ``family`` to ``path``; ``overrides`` go to its configuration."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        # With the usual 0.02 the logits of a random model are nearly flat, and any fault goes unseen.
        "initializer_range": 0.1,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    config_class, model_class = _FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**(settings | overrides)))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts these at zero, which would hide a lost one
                torch.nn.init.normal_(parameter, std=0.1)
            elif "norm" in name:  # and these at one, which would hide a missing one
                parameter.data += 0.3 * torch.randn(parameter.shape)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=shard_size)
    return path


def tiny_llama(path: Path, **overrides: Any) -> Path:
    """Write a random-weight Llama with a byte-level tokenizer and a chat template to ``path``, and return it."""
    tiny_model(path, **overrides)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer of single bytes to ``path``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    wrapped.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    wrapped.save_pretrained(path)


def edit_config(path: Path, **changes: Any) -> None:
    """Change values of a checkpoint's ``config.json``; None removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
