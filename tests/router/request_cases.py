from __future__ import annotations

from typing import TypeVar

from worker_facts import worker

from protocol.ids import RequestKey
from protocol.messages import ErrorInfo, Failed, Tokens
from protocol.sampling import FinishReason, SamplingParams
from router.front.generation import Generation
from router.instructions import (
    Instruction,
    SendCancel,
)
from router.policy import Placement
from router.request import RequestMachine
from router.request_limits import RequestLimits

P0, D0 = worker("p0", "prefill"), worker("d0", "decode")
P1, D1 = worker("p1", "prefill"), worker("d1", "decode")
PAIR, OTHER_PAIR = Placement(P0, D0), Placement(P1, D1)
PROMPT = (5, 6, 7)
LIMITS = RequestLimits()

I = TypeVar("I")  # noqa: E741


def machine(max_tokens: int = 8, *, limits: RequestLimits = LIMITS, timeout: float | None = None) -> RequestMachine:
    sampling = SamplingParams(temperature=0.5, seed=3, max_tokens=max_tokens, stop_token_ids=(2,))
    generation = Generation(token_ids=PROMPT, sampling=sampling, cache_salt="salt", timeout=timeout)
    return RequestMachine("r", generation, limits)


def started(max_tokens: int = 8, **options: object) -> RequestMachine:
    request = machine(max_tokens, **options)  # type: ignore[arg-type]
    request.submit(0.0)
    request.placed(PAIR, 0.0)
    return request


def decoding() -> RequestMachine:
    request = started()
    request.tokens(P0.peer, tokens(0, 11), 1.0)
    request.tokens(D0.peer, tokens(1, 12, 13), 2.0)
    return request


def tokens(start: int, *ids: int, attempt: int = 0, finish: FinishReason | None = None) -> Tokens:
    return Tokens(key=RequestKey("r", attempt), start=start, token_ids=ids, finish_reason=finish)


def failure(code: str, *, attempt: int = 0) -> Failed:
    return Failed(key=RequestKey("r", attempt), error=ErrorInfo(code=code, message=f"because {code}", field=None))


def only(kind: type[I], instructions: list[Instruction]) -> list[I]:
    return [each for each in instructions if isinstance(each, kind)]


def cancelled(instructions: list[Instruction]) -> set[tuple[str, int]]:
    return {(each.peer.name, each.key.attempt) for each in only(SendCancel, instructions)}
