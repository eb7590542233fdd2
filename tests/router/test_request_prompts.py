"""The request machine puts a prompt's log-probabilities together, over all attempts, each of them once."""

from __future__ import annotations

import struct

import pytest
from request_cases import D0, OTHER_PAIR, P0, P1, PAIR, cancelled, failure, only, tokens

from protocol.errors import InvalidRequest, MalformedFrame
from protocol.ids import RequestKey
from protocol.messages import PromptLogprobs
from protocol.prompt_logprobs import LogprobTable
from protocol.sampling import SamplingParams
from router.front.generation import Generation
from router.instructions import Emit, Instruction, NeedPlacement, Retry, SendPrefill
from router.request import RequestMachine
from router.request_limits import RequestLimits
from router.request_table import RequestState

PROMPT = tuple(range(10, 22))


def table(start: int, stop: int) -> LogprobTable:
    """Of the tokens from ``start`` to ``stop``: the log-probability is the index."""
    indices = range(start, stop)
    numbers = struct.pack(f"<{len(indices)}f", *indices)
    ranks = struct.pack(f"<{len(indices)}I", *indices)
    return LogprobTable(1, numbers, ranks, ranks, numbers)


def told(start: int, stop: int, attempt: int = 0) -> PromptLogprobs:
    return PromptLogprobs(key=RequestKey("r", attempt), start=start, table=table(start, stop))


def begun(prompt: tuple[int, ...] = PROMPT, alternatives: int | None = 1, max_tokens: int = 8) -> RequestMachine:
    sampling = SamplingParams(max_tokens=max_tokens)
    request = RequestMachine("r", Generation(prompt, sampling, prompt_logprobs=alternatives), RequestLimits())
    request.submit(0.0)
    return request


def asked(instructions: list[Instruction]) -> tuple[int | None, int]:
    (prefill,) = only(SendPrefill, instructions)
    return prefill.message.prompt_logprobs, prefill.message.prompt_logprobs_from


def indices(emit: Emit) -> list[int]:
    return [int(row.logprob) for each in emit.prompt_logprobs for row in each.rows()]


def test_they_come_out_with_the_first_token() -> None:
    request = begun()
    assert asked(request.placed(PAIR, 0.0)) == (1, 1)
    for start, stop in ((1, 4), (4, 8), (8, 12)):
        assert request.prompt_told(P0.peer, told(start, stop), 0.5) == []
    (emit,) = only(Emit, request.tokens(P0.peer, tokens(0, 11), 1.0))
    assert indices(emit) == list(range(1, 12))
    (emit,) = only(Emit, request.tokens(D0.peer, tokens(1, 12), 2.0))
    assert indices(emit) == []


def test_a_prompt_of_one_token_has_none_and_asks_for_none() -> None:
    request = begun(PROMPT[:1])
    assert asked(request.placed(PAIR, 0.0)) == (None, 1)
    assert only(Emit, request.tokens(P0.peer, tokens(0, 11), 1.0))


def test_a_retry_asks_for_what_is_missing() -> None:
    request = begun()
    request.placed(PAIR, 0.0)
    request.prompt_told(P0.peer, told(1, 6), 0.5)
    request.failed(P0.peer, failure("engine_failure"), 1.0)
    assert asked(request.placed(OTHER_PAIR, 1.0)) == (1, 6)
    # A late message of the first attempt, and one of a worker that this attempt does not run on.
    assert request.prompt_told(P0.peer, told(6, 9), 1.1) == []
    assert request.prompt_told(P0.peer, told(6, 9, 1), 1.1) == []
    assert request.prompt_told(P1.peer, told(6, 12, 1), 1.2) == []
    (emit,) = only(Emit, request.tokens(P1.peer, tokens(0, 11, attempt=1), 2.0))
    assert indices(emit) == list(range(1, 12))
    # What was given out is not asked for again.
    request.failed(PAIR.decode.peer if PAIR.decode else P0.peer, failure("preempted", attempt=1), 3.0)
    request.worker_lost(OTHER_PAIR.decode.peer, "killed", 3.0)  # type: ignore[union-attr]
    instructions = request.placed(PAIR, 3.0)
    assert asked(instructions)[0] is None
    (emit,) = only(Emit, request.tokens(P0.peer, tokens(1, 12, attempt=2), 4.0))
    assert indices(emit) == []


def test_what_comes_twice_counts_once() -> None:
    request = begun()
    request.placed(PAIR, 0.0)
    for piece in (told(1, 6), told(1, 6), told(6, 12), told(3, 5), told(6, 12)):
        assert request.prompt_told(P0.peer, piece, 0.5) == []
    (emit,) = only(Emit, request.tokens(P0.peer, tokens(0, 11), 1.0))
    assert indices(emit) == list(range(1, 12))


@pytest.mark.parametrize("piece", [(4, 6), (3, 12), (2, 13)], ids=["a gap", "a longer gap", "too many"])
def test_a_gap_is_a_retry(piece: tuple[int, int]) -> None:
    request = begun()
    request.placed(PAIR, 0.0)
    request.prompt_told(P0.peer, told(1, 2), 0.1)
    instructions = request.prompt_told(P0.peer, told(*piece), 0.5)
    assert len(only(Retry, instructions)) == len(only(NeedPlacement, instructions)) == 1
    assert cancelled(instructions) == {("p0", 0), ("d0", 0)}
    assert asked(request.placed(OTHER_PAIR, 1.0)) == (1, 2)


def test_a_first_token_before_all_of_them_is_a_retry() -> None:
    request = begun(max_tokens=1)
    request.placed(PAIR, 0.0)
    request.prompt_told(P0.peer, told(1, 11), 0.5)
    instructions = request.tokens(P0.peer, tokens(0, 11, finish="length"), 1.0)
    assert only(Retry, instructions)
    assert not only(Emit, instructions)
    assert request.state is RequestState.QUEUED


def test_what_nobody_asked_for_is_not_kept() -> None:
    request = begun(alternatives=None)
    assert asked(request.placed(PAIR, 0.0)) == (None, 1)
    assert request.prompt_told(P0.peer, told(1, 12), 0.5) == []
    (emit,) = only(Emit, request.tokens(P0.peer, tokens(0, 11), 1.0))
    assert indices(emit) == []


@pytest.mark.parametrize("value", [-1, 21])
def test_what_no_worker_could_decode_is_refused(value: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        begun(alternatives=value)
    assert caught.value.field == "prompt_logprobs"


@pytest.mark.parametrize("spoilt", ["ranks", "top_ids", "top_logprobs", "logprobs"])
def test_columns_of_a_table_are_of_one_length(spoilt: str) -> None:
    columns = {"logprobs": bytes(8), "ranks": bytes(8), "top_ids": bytes(16), "top_logprobs": bytes(16)}
    assert len(LogprobTable(width=2, **columns)) == 2
    with pytest.raises(MalformedFrame):
        LogprobTable(width=2, **{**columns, spoilt: columns[spoilt] + bytes(1)})
