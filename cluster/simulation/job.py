"""One attempt of one request, on its way through a prefill and a decode worker.

Life cycle: sent, computed by prefill and reserved for by decode in whichever order, its blocks carried over, decoded,
ended. One that was given up is passed over by whoever has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.simulation.block_cache import Stay
from cluster.simulation.prompt import SimulatedPrompt

if TYPE_CHECKING:
    from cluster.simulation.decode_worker import DecodeWorker
    from cluster.simulation.prefill_worker import PrefillWorker
    from cluster.simulation.record import Request


@dataclass(slots=True, eq=False)
class Job:
    """One attempt.

    Attributes:
        request: which.
        attempt: which, from 0.
        prompt: what is to be computed.
        output: tokens that are wanted of it.
        prefill, decode: where; no decode where prefill's token is the whole answer, and the same where a decode worker
            computes the prompt itself.
        here, there: of prefill's pool, and of decode's; None before, and after.
        computed: tokens of the prompt that are through.
        begun: when prefill let it in.
        reserved, first: when decode made room, and prefill had the first token; None before.
        nbytes, crossed: that went from prefill to decode, and the seconds that they took.
        joined: decode's steps when it joined them.
        given_up: nobody wants it any more.
    """

    request: Request
    attempt: int
    prompt: SimulatedPrompt
    output: int
    prefill: PrefillWorker | DecodeWorker
    decode: DecodeWorker | None
    here: Stay | None = None
    there: Stay | None = None
    computed: int = 0
    begun: float = 0.0
    reserved: float | None = None
    first: float | None = None
    nbytes: int = 0
    crossed: float = 0.0
    joined: int = -1
    given_up: bool = False
