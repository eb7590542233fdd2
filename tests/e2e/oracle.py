"""What transformers says on the same weights: the only authority on a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM


class Departure(NamedTuple):
    """Where a text leaves the greedy one.

    Attributes:
        index: of the first token that is another.
        token_id: it.
        best: what transformers would have drawn.
        gap: by how much the logit of ``best`` is above that of ``token_id``.
        spread: standard deviation of the logits there.
    """

    index: int
    token_id: int
    best: int
    gap: float
    spread: float


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

    def greedy_together(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """The same of many prompts in one batch: of a model that is not tiny, each step costs what that of one does."""
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self.model.generate(
            padded,
            attention_mask=seen,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found: list[list[int]] = output[:, longest:].tolist()
        return found

    def departure(self, token_ids: Sequence[int], answer: Sequence[int], tie: float = 0.0) -> Departure | None:
        """Where ``answer`` leaves the greedy continuation, judged in one pass over the whole text; None if nowhere.

        What is within ``tie`` of the best, in standard deviations of the logits, counts as the best.
        """
        with torch.inference_mode():
            whole = torch.tensor([[*token_ids, *answer]])
            logits = self.model(whole).logits[0, len(token_ids) - 1 : -1]
        for index, (row, token_id) in enumerate(zip(logits, answer, strict=True)):
            best, spread = int(row.argmax()), float(row.std())
            gap = float(row[best] - row[token_id])
            if best != token_id and gap >= tie * spread:
                return Departure(index, token_id, best, gap, spread)
        return None
