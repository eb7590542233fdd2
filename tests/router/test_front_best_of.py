"""Of several candidates the likeliest per token are shown, and all of them are counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from front_stage import MODEL, REPORT, TIMED, ScriptedService, ask

from protocol.sampling import TokenLogprobs
from router.front.generation import Generation, Output
from router.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"
# By seed: the log-probabilities of its tokens. Seeds 41 and 43 tie at the second place; 42 has the highest sum.
LOGPROBS = {40: (-0.1, -0.2, -0.3), 41: (-0.5, -0.5), 42: (-0.6,), 43: (-0.25, -0.75), 44: (-0.01,) * 2 + (-9.0,)}


async def candidates(generation: Generation) -> AsyncIterator[Output]:
    """The token of a candidate is its seed; what is found in the cache is its own as well."""
    seed = generation.sampling.seed
    assert generation.sampling.logprobs is not None
    values = LOGPROBS[seed]
    for index, value in enumerate(values):
        last = index + 1 == len(values)
        report = replace(REPORT, cached_tokens=seed) if last else None
        yield Output((seed,), "length" if last else None, report, (TokenLogprobs(value),))


@pytest.mark.parametrize(("n", "best"), [(1, [40]), (2, [40, 41]), (3, [40, 41, 43]), (4, [40, 41, 43, 42])])
def test_the_likeliest_per_token_are_shown_in_their_order(n: int, best: list[int], bpe_tokenizer: Tokenizer) -> None:
    body = {"model": MODEL, "prompt": [[5, 6], [7]], "n": n, "best_of": 5, "seed": 40, "max_tokens": 3}
    service = ScriptedService(candidates)
    answer = ask(bpe_tokenizer, service, COMPLETIONS, body, **TIMED).json()
    texts = ["".join(bpe_tokenizer.token_bytes(seed).decode() * len(LOGPROBS[seed])) for seed in best]
    assert [choice["text"] for choice in answer["choices"]] == texts * 2
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * n))
    # Ranked by what the client did not ask to see.
    assert {choice["logprobs"] for choice in answer["choices"]} == {None}
    assert len(service.generations) == 10
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 2 * sum(map(len, LOGPROBS.values())))
    # A prompt counts once, and so does what was found of it.
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * 40
    assert [report["cached_tokens"] for report in answer["kvferry"]] == best * 2


def test_each_shown_candidate_has_its_own_log_probabilities(bpe_tokenizer: Tokenizer) -> None:
    body = {"model": MODEL, "prompt": "x", "n": 2, "best_of": 5, "seed": 40, "logprobs": 0, "echo": False}
    answer = ask(bpe_tokenizer, ScriptedService(candidates), COMPLETIONS, body).json()
    shown = [tuple(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    assert shown == [LOGPROBS[40], LOGPROBS[41]]


def test_a_stop_token_counts_and_what_follows_a_stop_string_does_not(bpe_tokenizer: Tokenizer) -> None:
    a, b, c = (bpe_tokenizer.encode(letter)[0] for letter in "abc")
    said = {
        # With its stop token it is the less likely one.
        0: Output((a, 2), "stop", None, (TokenLogprobs(-0.1), TokenLogprobs(-1.5))),
        # Without what comes after the stop string it is the likelier one.
        1: Output((b, c, a), "length", None, (TokenLogprobs(-0.4), TokenLogprobs(-0.4), TokenLogprobs(-9.0))),
    }

    async def script(generation: Generation) -> AsyncIterator[Output]:
        yield said[generation.sampling.seed]

    body = {"model": MODEL, "prompt": "x", "best_of": 2, "seed": 0, "stop": "c"}
    answer = ask(bpe_tokenizer, ScriptedService(script), COMPLETIONS, body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["b"]
    assert answer["usage"]["completion_tokens"] == 4


def test_as_many_as_are_shown_are_not_ranked(bpe_tokenizer: Tokenizer) -> None:
    async def script(generation: Generation) -> AsyncIterator[Output]:
        assert generation.sampling.logprobs is None
        yield Output((generation.sampling.seed,), "length")

    for stream in (False, True):
        body = {"model": MODEL, "prompt": "x", "n": 2, "best_of": 2, "seed": 70, "stream": stream}
        assert ask(bpe_tokenizer, ScriptedService(script), COMPLETIONS, body).status_code == 200
