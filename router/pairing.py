"""Which prefill and decode workers can serve a request together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protocol.ids import Peer
from protocol.messages import WorkerProfile
from router.registry import Worker


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


def kind(worker: Worker) -> tuple[object, ...]:
    """All that :func:`unpaired` looks at: workers of one kind pair with the same others."""
    profile = worker.profile
    return (profile.model, profile.vocab_size, profile.layout, bool(profile.peer_endpoint), worker.speaks)


def unpaired(prefill: Worker, decode: Worker) -> str | None:
    """Why two workers cannot serve one request together: what they speak, or what they are; None when they can."""
    if prefill.speaks.common(decode.speaks) is None:
        return f"wire version: {prefill.speaks} here, {decode.speaks} there"
    return mismatch(prefill.profile, decode.profile)


def complaints(peer: Peer, workers: Sequence[Worker], model: str) -> Iterator[str]:
    """What is wrong with a worker that has just joined: its model, or each other that it cannot be paired with."""
    joined = next(worker for worker in workers if worker.peer == peer)
    if joined.profile.model != model:
        yield f"worker {joined.peer} serves {joined.profile.model!r}, not {model!r}: not used"
        return
    for other in workers:
        if not other.live or other.profile.role == joined.profile.role:
            continue
        prefill, decode = (joined, other) if joined.profile.role == "prefill" else (other, joined)
        reason = unpaired(prefill, decode)
        if reason is not None:
            yield f"workers {prefill.peer} and {decode.peer} cannot be paired: {reason}"
