"""What the router says of where a request went, and why."""

from __future__ import annotations

import msgspec

from router.client.results import decoded


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Of one placement, in seconds; None where there is none, or it is not known yet.

    Attributes:
        ttft_s: placement to first token.
        tpot_s: between two output tokens after the first.
        transfer_s: for the blocks to cross that decode had not; only predicted.
        cached_tokens: prompt tokens that prefill was known to have; only predicted.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    transfer_s: float | None = None
    cached_tokens: int | None = None


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """How a request was let in, or why not; times in seconds.

    Attributes:
        slo_class: of the request.
        outcome: "admitted"; else why it was refused: "target", "deadline" or "queue_full".
        waited_s: in the router's queue.
        wanted_s: within which its first token was to come; None where there was no bound.
        predicted_ttft_s: when it came; None where it did not have to wait.
    """

    slo_class: str = msgspec.field(name="class")
    outcome: str
    waited_s: float = 0.0
    wanted_s: float | None = None
    predicted_ttft_s: float | None = None


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """One placement of one generation; of one that was refused, only what is known of it.

    Attributes:
        request: the router's id of the generation.
        attempt: 0 for the first.
        policy: that chose.
        prompt_tokens: of the attempt.
        local_prefill: why the decode worker prefills; "" where a prefill worker does.
        admission: how it was let in; None of further attempts.
        prefill, decode: names of the workers.
        predicted, measured: times.
        prefill_candidates, decode_candidates: of each worker that was looked at its name and what it was judged by.
    """

    request: str
    attempt: int = 0
    policy: str = ""
    prompt_tokens: int
    local_prefill: str = ""
    admission: Admitted | None = None
    prefill: str = ""
    decode: str | None = None
    predicted: Times = Times()
    measured: Times = Times()
    prefill_candidates: tuple[dict[str, str | float], ...] = ()
    decode_candidates: tuple[dict[str, str | float], ...] = ()


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Each placement of a client's request, in order."""

    request: str
    decisions: tuple[Placed, ...]


def explanation_of(body: bytes) -> Explanation:
    """What ``/explain/`` says.

    Raises:
        MalformedFrame: it is something else.
    """
    return decoded(body, Explanation, "the router's explanation cannot be read")
