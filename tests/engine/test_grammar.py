"""Grammars held against what a parser of the same language says of the finished text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLParserLimits
from tokenizers import Tokenizer

from engine.grammar import Grammars
from engine.logit_rules import Row
from engine.sampler import sample
from protocol.errors import InvalidRequest, UnsupportedField
from protocol.grammar import Grammar
from protocol.sampling import SamplingParams

STOP = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["s", "m"]},
        "count": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "size", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary(tiny_llama_dir: Path) -> int:
    return int(json.loads((tiny_llama_dir / "config.json").read_text())["vocab_size"])


@pytest.fixture
def grammars(tiny_llama_dir: Path, vocabulary: int) -> Grammars:
    made = Grammars(tiny_llama_dir, vocabulary)
    made.warm_up()
    return made


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_llama_dir / "tokenizer.json"))


def settings(grammar: Grammar, **others: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar, stop_token_ids=(STOP,), max_tokens=400, **others)


def drawn(grammars: Grammars, sampling: SamplingParams, vocabulary: int, seed: int, prompt: list[int]) -> list[int]:
    """An output of random logits, up to its stop token."""
    numbers = np.random.default_rng(seed)
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens:
        position = len(tokens) - len(prompt)
        logits = torch.from_numpy(numbers.normal(size=(1, vocabulary)).astype(np.float32))
        row = Row(sampling, position, tokens, grammars.allowed(sampling, position, tokens))
        token = sample(logits, [row])[0].token_id
        if token == STOP:
            return tokens[len(prompt) :]
        tokens.append(token)
    raise AssertionError("it did not end")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_model_says_the_text_is_of_the_form(
    grammars: Grammars, tokenizer: Tokenizer, vocabulary: int, seed: int
) -> None:
    pattern = r"[A-Z][a-z]{2,5}-[0-9]{3}"
    text = tokenizer.decode(drawn(grammars, settings(Grammar("regex", pattern), seed=seed), vocabulary, seed, [7, 8]))
    assert re.fullmatch(pattern, text)
    choice = Grammar("lark", 'start: "yes" | "no" | "\\"maybe\\""')
    text = tokenizer.decode(drawn(grammars, settings(choice, temperature=0.0), vocabulary, seed, []))
    assert text in ("yes", "no", '"maybe"')
    schema = Grammar("json_schema", json.dumps(SCHEMA))
    found = json.loads(tokenizer.decode(drawn(grammars, settings(schema, seed=seed), vocabulary, seed, [9])))
    assert set(found) == {"name", "size", "count"}
    assert found["size"] in ("s", "m")
    assert 0 <= found["count"] <= 99


def test_what_is_allowed_depends_on_the_output_alone(
    tiny_llama_dir: Path, grammars: Grammars, tokenizer: Tokenizer, vocabulary: int
) -> None:
    sampling = settings(Grammar("json_schema", json.dumps(SCHEMA)))
    output = tokenizer.encode('{"name": "a", "si').ids
    fresh = Grammars(tiny_llama_dir, vocabulary)
    fresh.warm_up()
    for position in range(len(output) + 1):
        known = grammars.allowed(sampling, position, [5, 6, *output[:position]])
        # With another prompt, in another order, by one that has not been there before.
        other = fresh.allowed(sampling, len(output) - position, [1, *output[: len(output) - position]])
        third = Grammars(tiny_llama_dir, vocabulary)
        third.warm_up()
        again = third.allowed(sampling, position, output[:position])
        assert known is not None
        assert other is not None
        assert (known == again).all()
    (only,) = np.flatnonzero(grammars.allowed(sampling, len(output), output))
    assert tokenizer.decode([int(only)]) == "z"


def test_requests_of_one_grammar_do_not_disturb_each_other(grammars: Grammars, tokenizer: Tokenizer) -> None:
    sampling = settings(Grammar("regex", "ab|ac|b"))
    a, b = (tokenizer.encode(letter).ids for letter in "ab")
    for _ in range(3):
        for output, letters in (([], "ab"), (a, "bc"), (b, ""), ([], "ab"), (a, "bc")):
            allowed = grammars.allowed(sampling, len(output), output)
            assert allowed is not None
            expected = {*(tokenizer.encode(letter).ids[0] for letter in letters), *(() if letters else (STOP,))}
            assert set(np.flatnonzero(allowed)) == expected


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns all the time."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("restless")
def test_requests_are_checked_while_others_are_drawn(grammars: Grammars, tokenizer: Tokenizer) -> None:
    letters = "abcdefghij"
    ids = [tokenizer.encode(letter).ids[0] for letter in letters]
    over = Event()

    def check() -> None:
        number = 0
        while not over.is_set():
            number += 1
            assert grammars.refusal(settings(Grammar("regex", f"(k|l){{{number % 50 + 1}}}"))) is None

    with ThreadPoolExecutor(1) as pool:
        checking = pool.submit(check)
        try:
            for turn in range(2000):
                place = turn % len(letters)
                allowed = grammars.allowed(settings(Grammar("regex", letters)), place, ids[:place])
                assert allowed is not None
                assert np.flatnonzero(allowed).tolist() == [ids[place]]
        finally:
            over.set()
        checking.result()


def test_an_output_that_left_the_grammar_is_free(grammars: Grammars, tokenizer: Tokenizer) -> None:
    sampling = settings(Grammar("regex", "ab"))
    assert grammars.allowed(sampling, 1, tokenizer.encode("x").ids) is None
    assert grammars.allowed(SamplingParams(), 0, []) is None


def test_an_end_that_must_come_comes_though_it_is_early(
    grammars: Grammars, tokenizer: Tokenizer, vocabulary: int
) -> None:
    sampling = settings(Grammar("regex", "ab?"), min_tokens=9)
    output = drawn(grammars, sampling, vocabulary, 3, [])
    # The letter that may come is taken before the end that comes too early.
    assert tokenizer.decode(output) == "ab"


def test_what_ends_an_output_is_the_requests_to_say(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The tokenizer's own end is id 2 here; a checkpoint's generation config may name others."""
    word = tokenizer.encode("ab").ids
    named = SamplingParams(grammar=Grammar("regex", "ab"), stop_token_ids=(4, 5))
    allowed = grammars.allowed(named, 2, word)
    assert allowed is not None
    assert np.flatnonzero(allowed).tolist() == [4, 5]
    nothing = SamplingParams(grammar=Grammar("regex", "ab"))
    for ends in range(4):
        # Nothing ends it, and nothing else may come: never free text.
        allowed = grammars.allowed(nothing, 2 + ends, [*word, *[STOP] * ends])
        assert allowed is not None
        assert np.flatnonzero(allowed).tolist() == [STOP]


def test_an_end_that_the_request_does_not_name_is_none_while_there_is_more_to_say(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    word = tokenizer.encode("ab").ids
    sampling = SamplingParams(grammar=Grammar("regex", "abc?"))
    allowed = grammars.allowed(sampling, 2, word)
    assert allowed is not None
    assert np.flatnonzero(allowed).tolist() == tokenizer.encode("c").ids


def test_log_probabilities_are_the_models_own(grammars: Grammars, vocabulary: int) -> None:
    sampling = settings(Grammar("regex", "b"), temperature=0.0, logprobs=1)
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(4))
    row = Row(sampling, 0, [], grammars.allowed(sampling, 0, []))
    (draw,) = sample(logits, [row])
    assert draw.logprobs is not None
    expected = torch.log_softmax(logits, -1)[0]
    assert draw.logprobs.logprob == pytest.approx(float(expected[draw.token_id]))
    assert draw.logprobs.top[0][0] == int(expected.argmax())


def test_what_cannot_be_served_says_why(tmp_path: Path, grammars: Grammars) -> None:
    assert grammars.refusal(SamplingParams()) is None
    assert grammars.refusal(settings(Grammar("regex", "a+"))) is None
    broken = grammars.refusal(settings(Grammar("regex", "(a")))
    assert isinstance(broken, InvalidRequest)
    assert "unclosed group" in broken.message
    without = Grammars(tmp_path, 10).refusal(settings(Grammar("regex", "a")))
    assert isinstance(without, UnsupportedField)
    assert "tokenizer.json" in without.message


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(a{1000}){1000}"),
        Grammar("json_schema", '{"a":' * 400 + "1" + "}" * 400),
        Grammar("json_schema", "no json"),
        Grammar("lark", "start: nothing"),
    ],
    ids=["large", "deep", "no schema", "no rule"],
)
def test_a_grammar_that_is_too_large_or_none_is_refused_and_the_next_one_served(
    grammars: Grammars, grammar: Grammar
) -> None:
    for _ in range(2):
        assert isinstance(grammars.refusal(settings(grammar)), InvalidRequest)
    assert grammars.refusal(settings(Grammar("regex", "a"))) is None


def test_a_grammar_that_proves_too_large_in_mid_way_ends_the_output(
    grammars: Grammars, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.matchers.LIMITS", LLParserLimits(step_max_items=60))
    sampling = settings(Grammar("lark", 'start: a\na: a a | "x"'))
    (x,) = tokenizer.encode("x").ids
    assert grammars.refusal(sampling) is None
    seen = []
    while not seen or STOP not in seen[-1] or x in seen[-1]:
        allowed = grammars.allowed(sampling, len(seen), [x] * len(seen))
        assert allowed is not None
        seen.append(np.flatnonzero(allowed).tolist())
    assert len(seen) > 3
    assert seen[0] == [x]
    assert seen[-1] == [STOP]
    assert f"given up after {len(seen) - 1} tokens" in caplog.text


def test_matchers_are_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    monkeypatch.setattr("engine.grammar.KEPT", 8)
    output = tokenizer.encode("abcdefghijklmnopqrst").ids
    grammars.warm_up()
    for number in range(20):
        sampling = settings(Grammar("regex", f"[a-z]{{1,{number + 30}}}"))
        assert grammars.allowed(sampling, number, output[:number]) is not None
    assert len(grammars._places) == len(grammars._compiled) == 8
    monkeypatch.setattr("engine.grammar.KEPT_BYTES", 50)
    assert grammars.allowed(settings(Grammar("regex", "[a-z]{1,99}")), 3, output[:3]) is not None
    assert 1 <= len(grammars._compiled) < 5
