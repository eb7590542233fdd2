"""GPUDirect: whether KV of a GPU's pool goes to other hosts by RDMA itself, or passes pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.doctor.finding import Finding, Verdict
from cluster.doctor.wish import Wish
from kv_transfer.choice import GPUDIRECT_BY
from protocol.errors import ConfigError

CHECK = "gpudirect"


def judge_gpudirect(by: Sequence[str], reason: str | None, wish: Wish) -> Finding:
    """Which of the two ways it will be, and why.

    Args:
        by: RDMA devices that reach the GPU's memory.
        reason: why none does; None where one does.
        wish: what shall work.
    """
    transfer = wish.config.transfer
    if transfer.gpudirect == "off":
        said = "switched off by transfer.gpudirect: a GPU's KV passes pinned host memory on its way to other hosts"
        return Finding(check=CHECK, verdict="note", said=said)
    if reason is None:
        said = f"RDMA reads and writes GPU memory itself, by {', '.join(by)}"
        if transfer.transport != GPUDIRECT_BY:
            said = f"{said}; transport {transfer.transport!r} does without: a GPU's KV passes pinned host memory"
            fix = f"transfer.transport {GPUDIRECT_BY} uses it"
            return Finding(check=CHECK, verdict="note", said=said, fix=fix)
        if transfer.checksum or transfer.wire_dtype is not None:
            said = f"{said}, but not with checksums or a wire_dtype: KV passes pinned host memory then"
            return Finding(check=CHECK, verdict="note", said=said)
        return Finding(check=CHECK, verdict="ok", said=said)
    said = f"a GPU's KV passes pinned host memory on its way to other hosts: {reason}"
    if transfer.gpudirect == "on":
        fix = "set transfer.gpudirect to auto, or do what it says"
        return Finding(check=CHECK, verdict=wish.unmet, said=said, fix=fix)
    verdict: Verdict = "warning" if wish.gpus and transfer.transport == GPUDIRECT_BY else "note"
    return Finding(check=CHECK, verdict=verdict, said=said)


def examine_gpudirect(wish: Wish) -> list[Finding]:
    """Ask UCX and the first GPU."""
    from kv_transfer.ucx.gpudirect import examine

    try:
        found = examine(0)
    except ConfigError as error:
        return [judge_gpudirect((), error.message, wish)]
    return [judge_gpudirect(found.by, found.why_not(), wish)]
