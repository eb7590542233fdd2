"""What transformers says on the same weights: the only authority on a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Oracle:
    """Greedy continuations in float32, remembered by prompt."""

    def __init__(self, path: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.vocab_size: int = self.model.config.vocab_size
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def greedy(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        key = (tuple(token_ids), max_tokens)
        if key not in self._known:
            prompt = torch.tensor([list(token_ids)])
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            self._known[key] = output[0, len(token_ids) :].tolist()
        return self._known[key]
