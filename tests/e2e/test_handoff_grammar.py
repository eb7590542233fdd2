"""A grammar holds from the first token, which prefill draws, to the last, and after a retry."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from oracle import Oracle
from rack import rack
from tokenizers import Tokenizer
from transformers import LogitsProcessor

from protocol.errors import InvalidRequest
from protocol.grammar import Grammar
from protocol.sampling import SamplingParams
from router.front.generation import Generation

PROMPT = [9, 4, 30, 9, 12, 7, 4, 4, 50, 9, 33]
STOP = 2
PATTERN = r"[a-f]{3}-([0-9]{2}|[x-z]{9}) [A-Z]{2,20}"
MAX_TOKENS = 40


class Masked(LogitsProcessor):
    """The same grammar on transformers' own generation."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        tokenizer = LLTokenizer((path / "tokenizer.json").read_text(), n_vocab=vocab_size, eos_token=STOP)
        self.matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(PATTERN))
        self.bits = allocate_token_bitmask(1, vocab_size)
        self.vocab_size = vocab_size

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > len(PROMPT):
            self.matcher.consume_token(int(input_ids[0, -1]))
        fill_next_token_bitmask(self.matcher, self.bits)
        allowed = np.unpackbits(self.bits.view(np.uint8), bitorder="little")[: self.vocab_size].astype(bool)
        return scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)


@pytest.fixture
def expected(tiny_llama_dir: Path, tiny_oracle: Oracle) -> list[int]:
    ids = torch.tensor([PROMPT])
    output = tiny_oracle.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=STOP,
        pad_token_id=0,
        logits_processor=[Masked(tiny_llama_dir, tiny_oracle.vocab_size)],
    )
    return [token for token in output[0, len(PROMPT) :].tolist() if token != STOP]


def asked(**others: object) -> SamplingParams:
    grammar = Grammar("regex", PATTERN)
    return SamplingParams(grammar=grammar, max_tokens=MAX_TOKENS, stop_token_ids=(STOP,), **others)  # type: ignore[arg-type]


async def test_the_text_is_transformers_text_under_the_same_grammar(
    tiny_llama_dir: Path, tiny_oracle: Oracle, expected: list[int]
) -> None:
    async with rack(tiny_llama_dir) as running:
        found: list[int] = []
        generation = Generation(token_ids=tuple(PROMPT), sampling=asked(temperature=0.0))
        async for output in running.service.generate(generation):
            found += output.token_ids
        assert [token for token in found if token != STOP] == expected
        # Beside one that is free, and one that is not served.
        assert (await running.ask(PROMPT)).token_ids == tiny_oracle.greedy(PROMPT, 12)
        with pytest.raises(InvalidRequest, match="unclosed group"):
            await running.ask(PROMPT, grammar=Grammar("regex", "(a"))
    text = Tokenizer.from_file(str(tiny_llama_dir / "tokenizer.json")).decode(expected)
    assert re.fullmatch(PATTERN, text)


@pytest.mark.parametrize("emitted", [1, 4, 9])
async def test_a_retry_goes_on_where_the_grammar_was(emitted: int, tiny_llama_dir: Path) -> None:
    async with rack(tiny_llama_dir, decode=2) as running:
        texts: list[list[int]] = []
        for disturbed in (False, True):
            found: list[int] = []
            generation = Generation(token_ids=tuple(PROMPT), sampling=asked(temperature=1.0, seed=11))
            async for output in running.service.generate(generation):
                found += output.token_ids
                if disturbed and len(found) >= emitted:
                    disturbed = False
                    for worker in running.decode:
                        for key in worker._scheduler.asked_by(running.service._hub.me):  # type: ignore[union-attr]
                            worker._preempt(worker._scheduler.drop(key))  # type: ignore[arg-type]
            texts.append([token for token in found if token != STOP])
    assert texts[0] == texts[1]
    text = Tokenizer.from_file(str(tiny_llama_dir / "tokenizer.json")).decode(texts[0])
    assert re.fullmatch(PATTERN, text)
