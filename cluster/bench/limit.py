"""What a transport is held against: how fast this machine, or the way between two, moves the same bytes by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from cluster.bench.block_table import Transfer
from cluster.bench.near_end import Session

Limit = Literal["memcpy", "socket", "ucx_perftest"]

LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "memcpy": "one thread of the sending process copies the same spans from its pool to a second one by "
        "numpy.copyto",
        "socket": "one plain blocking TCP connection between the same two processes carries the same spans by sendmsg "
        "and recvmsg_into, 64 buffers a call, and one byte comes back",
        "ucx_perftest": "UCX's own benchmark between two processes of its own, over TCP: the best of its tests tag_bw, "
        "ucp_put_bw, ucp_am_bw and stream_bw with messages of 64 KiB and 1 MiB; for its rate, 64 MiB are moved",
    }
)
"""How each is measured. Both take turns with the transport, round by round."""


def limit_of(transport: str, *, same_host: bool, perftest: bool) -> Limit:
    """What a case's transport is held against.

    ``tcp`` goes through the kernel's sockets even on one machine; others do not have to, there. UCX that is held to TCP
    is held against UCX itself.

    Args:
        transport: of the case.
        same_host: whether both ends are on one machine.
        perftest: whether UCX's own benchmark is installed.
    """
    if same_host and transport == "ucx:tcp" and perftest:
        return "ucx_perftest"
    return "memcpy" if same_host and transport not in ("tcp", "ucx:tcp") else "socket"


async def begin(limit: Limit, session: Session, transfers: Sequence[Transfer]) -> None:
    """Make ready for rounds of ``transfers``."""
    if limit == "memcpy":
        await session.begin_copy()
    elif limit == "ucx_perftest":
        await session.perftest.best()
    else:
        await session.begin_plain(transfers)


async def limit_round(limit: Limit, session: Session, transfers: Sequence[Transfer]) -> float:
    """Seconds that the limit takes for all ``transfers``."""
    if limit == "memcpy":
        return await session.copy_round(transfers)
    if limit == "ucx_perftest":
        nbytes = sum(span.nbytes for transfer in transfers for span in transfer.spans())
        return nbytes / await session.perftest.rate(await session.perftest.best())
    return await session.plain_round(transfers)
