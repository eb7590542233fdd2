"""Choosing a prefill and a decode worker for one attempt: pure functions of a snapshot.

A policy ranks the workers of one role, best first; :func:`place` takes the first pair that fits together. A new policy
is one function and one line in ``POLICIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from protocol.errors import NoWorkerAvailable
from protocol.ids import Peer, Role
from protocol.messages import WorkerProfile
from router.registry import Worker


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What there is to choose from.

    Attributes:
        workers: all known workers, in a stable order.
        outstanding: this router's own unfinished work by worker: prompt tokens for prefill, sequences for decode.
        model: served name; workers of another one are left out.
        barred: peers that get nothing while there are others.
    """

    workers: Sequence[Worker]
    outstanding: Mapping[Peer, int]
    model: str
    barred: frozenset[Peer] = frozenset()


@dataclass(frozen=True, slots=True)
class Demand:
    """What one attempt wants.

    Attributes:
        needs_decode: False when the request ends with prefill's token.
        excluded: peers to avoid where there are others.
        turn: grows by one for each placement; equal workers take turns by it.
        prompt_tokens: that are to be prefilled.
    """

    needs_decode: bool
    excluded: frozenset[Peer] = frozenset()
    turn: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one attempt runs; without ``decode``, prefill's token is the whole answer.

    ``local`` tells why a decode worker prefills, which is then both; it is "" where a prefill worker does.
    """

    prefill: Worker
    decode: Worker | None
    local: str = ""

    @property
    def peers(self) -> frozenset[Peer]:
        """Each worker once."""
        return frozenset(worker.peer for worker in (self.prefill, self.decode) if worker is not None)


Policy = Callable[[Sequence[Worker], Mapping[Peer, int], int], list[Worker]]
"""Ranks workers of one role, best first, from ``(workers, outstanding, turn)``."""


def round_robin(workers: Sequence[Worker], outstanding: Mapping[Peer, int], turn: int) -> list[Worker]:
    """Each in its turn, whatever the load."""
    first = turn % len(workers) if workers else 0
    return [*workers[first:], *workers[:first]]


def least_loaded(workers: Sequence[Worker], outstanding: Mapping[Peer, int], turn: int) -> list[Worker]:
    """Fewest prompt tokens ahead (prefill) or fewest sequences (decode); equals take turns.

    A heartbeat is up to half a second old, so this router's own unfinished work is added to what it says.
    """

    def cost(worker: Worker) -> int:
        load = worker.load
        reported = load.waiting_tokens if worker.profile.role == "prefill" else load.running + load.waiting
        return reported + outstanding.get(worker.peer, 0)

    return sorted(round_robin(workers, outstanding, turn), key=cost)


POLICIES: dict[str, Policy] = {"round_robin": round_robin, "least_loaded": least_loaded}
"""Every policy by name."""


def mismatch(prefill: WorkerProfile, decode: WorkerProfile) -> str | None:
    """Why the two cannot serve one request together, naming both values; None when they can."""
    if prefill.model != decode.model:
        return f"model: {prefill.model!r} here, {decode.model!r} there"
    if prefill.vocab_size != decode.vocab_size:
        return f"vocab_size: {prefill.vocab_size} here, {decode.vocab_size} there"
    fatal = prefill.layout.geometry_differences(decode.layout)
    if fatal:
        return "; ".join(fatal)
    return None if prefill.peer_endpoint else "prefill announces no endpoint for other workers"


def serving(snapshot: Snapshot, role: Role) -> list[Worker]:
    """Workers of one role that take new work."""
    return [
        worker
        for worker in snapshot.workers
        if worker.accepts_work and worker.profile.model == snapshot.model and worker.profile.role == role
    ]


def ranked(policy: str, workers: Sequence[Worker], snapshot: Snapshot, demand: Demand, turn: int) -> list[Worker]:
    """Workers of one role as ``policy`` likes them, those to be avoided last."""
    liked = POLICIES[policy](workers, snapshot.outstanding, turn)
    return sorted(liked, key=lambda worker: (worker.peer in snapshot.barred, worker.peer in demand.excluded))


def place(policy: str, snapshot: Snapshot, demand: Demand) -> Placement:
    """The pair that ``policy`` likes best among those that fit together.

    Raises:
        NoWorkerAvailable: there is none; says which role is missing.
    """
    prefill = serving(snapshot, "prefill")
    if not prefill:
        raise NoWorkerAvailable("no prefill worker is available")
    ranked_prefill = ranked(policy, prefill, snapshot, demand, demand.turn)
    if not demand.needs_decode:
        return Placement(ranked_prefill[0], None)
    decode = serving(snapshot, "decode")
    if not decode:
        raise NoWorkerAvailable("no decode worker is available")
    # Shifted by one for each round of the prefill workers, so that every pair comes up, not only equal positions.
    ranked_decode = ranked(policy, decode, snapshot, demand, demand.turn + demand.turn // len(prefill))
    for chosen in ranked_prefill:
        for partner in ranked_decode:
            if mismatch(chosen.profile, partner.profile) is None:
                return Placement(chosen, partner)
    first = ranked_prefill[0], ranked_decode[0]
    raise NoWorkerAvailable(
        f"no prefill worker has a decode worker that it can ship to; {first[0].peer.name} (here) and "
        f"{first[1].peer.name} (there): {mismatch(first[0].profile, first[1].profile)}"
    )
