"""What a transport is held against: how fast this machine, or the way between two, moves the same bytes by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from cluster.bench.block_table import Transfer
from cluster.bench.near_end import Session

Limit = Literal["memcpy", "socket"]

LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "memcpy": "one thread of the sending process copies the same spans from its pool to a second one by "
        "numpy.copyto",
        "socket": "one plain blocking TCP connection between the same two processes carries the same spans by sendmsg "
        "and recvmsg_into, 64 buffers a call, and one byte comes back",
    }
)
"""How each is measured. Both take turns with the transport, round by round."""


def limit_of(scheme: str, *, same_host: bool) -> Limit:
    """``tcp`` goes through the kernel's sockets even on one machine; others do not have to, there."""
    return "memcpy" if same_host and scheme != "tcp" else "socket"


async def begin(limit: Limit, session: Session, transfers: Sequence[Transfer]) -> None:
    """Make ready for rounds of ``transfers``."""
    if limit == "memcpy":
        await session.begin_copy()
    else:
        await session.begin_plain(transfers)


async def limit_round(limit: Limit, session: Session, transfers: Sequence[Transfer]) -> float:
    """Seconds that the limit takes for all ``transfers``."""
    if limit == "memcpy":
        return await session.copy_round(transfers)
    return await session.plain_round(transfers)
