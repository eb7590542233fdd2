"""The seam between the HTTP front and the service that dispatches to workers.

The front speaks token ids through :class:`GenerationService` and knows nothing of workers, attempts or blocks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from protocol.prompt_logprobs import LogprobTable
from protocol.sampling import FinishReason, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from router.request_trace import ChoiceTrace

EndReason = FinishReason | Literal["tool_calls"]
"""Why an answer ended, as clients are told."""


@dataclass(frozen=True)
class Generation:
    """One prompt to continue.

    Attributes:
        token_ids: the prompt, not empty.
        sampling: how to draw; end-of-sequence ids are among its stop token ids.
        cache_salt: prefix-cache namespace.
        timeout: seconds for the whole request; None takes the service's default.
        prompt_logprobs: how many alternatives are wanted beside each prompt token's log-probability; None wants none.
        priority: of the request among others; lower is earlier.
        ttft_target: seconds within which the first token is worth having; None takes the service's default.
        session: whose requests go together, where the policy heeds it; "" when that is not known.
        name: of the client's request, by which it is explained; "" takes the service's own id.
        trace: sees what becomes of it; None where nobody will.
        slo_class: that it is served by; "" takes the default one.
        tenant: out of whose share it comes, while others wait too; "" is one of them.
        weight: of that share.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    timeout: float | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    ttft_target: float | None = None
    session: str = ""
    name: str = field(default="", compare=False)
    trace: ChoiceTrace | None = field(default=None, compare=False)
    slo_class: str = ""
    tenant: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class GenerationReport:
    """What one generation took; durations in seconds.

    Attributes:
        request_id: the service's id of it.
        attempts: attempts begun.
        cached_tokens: prompt tokens that the prefix cache saved.
        queue_s: arrival to the first chunk of prefill.
        prefill_s: first chunk to first token.
        handoff_s: first token to commit on the decode side.
        ttft_s: arrival to the first token at the router.
        decode_s: first token to last token.
        kv_blocks: that crossed.
        kv_bytes: that crossed.
        ship_s: time in the transport.
        transport: URI scheme that the KV went by; "" when none did.
        prefill_worker: its name.
        decode_worker: its name; "" when the request ended with its first token.
        local_prefill: why the decode worker computed the prompt itself, as ``router.local_prefill.Reason`` has it; ""
            when a prefill worker did.
    """

    request_id: str
    attempts: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    handoff_s: float
    ttft_s: float
    decode_s: float
    kv_blocks: int
    kv_bytes: int
    ship_s: float
    transport: str
    prefill_worker: str
    decode_worker: str
    local_prefill: str = ""


@dataclass(frozen=True)
class Output:
    """The next tokens of a generation.

    Attributes:
        token_ids: in order, each exactly once; a final stop token is among them.
        finish_reason: set on the last output only.
        report: set on the last output. An earlier output may carry what is known so far: it is all that a
            generation closed by a stop string ever reports.
        logprobs: one per token where the sampling asks for them, none elsewhere.
        prompt_logprobs: on the first output, a row for each prompt token but the first; where they were asked for.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    report: GenerationReport | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[LogprobTable, ...] = ()


Outputs = AsyncGenerator[Output, EndReason | None]
"""Outputs of one generation as they come.

Who has all that is wanted sends the reason in place of asking for the next one (``asend``): that ends it and
both legs, and the request has finished for that reason.
"""


@dataclass(frozen=True)
class ServiceHealth:
    """Whether the service can answer.

    Attributes:
        ready: a new request would find a pair of workers.
        prefill_workers: live ones.
        decode_workers: live ones.
        detail: for a person; holds no address.
    """

    ready: bool
    prefill_workers: int
    decode_workers: int
    detail: str


class GenerationService(Protocol):
    """Whoever can continue a prompt."""

    @property
    def model(self) -> str:
        """The served model's name."""

    @property
    def max_model_len(self) -> int | None:
        """Prompt plus output tokens at most, from the live workers; None while there is none."""

    def generate(self, generation: Generation) -> Outputs:
        """Continue a prompt.

        Leaving early, by ``aclose()`` or by cancelling the pending step, cancels both legs.

        Raises:
            KVFerryError: before the first output where it can.
        """

    def together(self, generations: Sequence[Generation]) -> AbstractContextManager[tuple[Outputs, ...]]:
        """Continue one prompt several times: it is computed once, and its blocks cross once.

        Args:
            generations: of one prompt, differing by their seeds alone.

        Returns:
            A context with the outputs of each, as :meth:`generate` gives them. Closing one cancels that one; leaving
            the context cancels whatever has not ended.

        Raises:
            KVFerryError: on entering it.
        """

    def health(self) -> ServiceHealth:
        """Whether a new request can be served now."""

    def cluster(self) -> dict[str, Any]:
        """The workers' state, ready for JSON."""

    def explain(self, name: str) -> list[dict[str, Any]]:
        """Each placement of a client's request, ready for JSON; none when it is not known (any more)."""

    def metrics(self) -> bytes:
        """All metrics in the Prometheus text format; may be called in any thread."""
