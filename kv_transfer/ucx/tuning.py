"""What we ask of UCX, and why; the one place where its environment is looked at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

SETTINGS: Mapping[str, str] = {
    # One segment per piece; with the default of 8 KiB, TCP reaches a quarter of the link.
    "TCP_TX_SEG_SIZE": "1m",
    "TCP_RX_SEG_SIZE": "1m",
    # UCX 1.13 ends the process ("Assertion `comp->count > 0' failed") when a peer dies in the middle of an eager
    # zero-copy send over TCP. The copy costs little there, and rendezvous over RDMA goes without one all the same.
    "ZCOPY_THRESH": "inf",
    # A block of 64 KiB goes by rendezvous, straight to where it belongs. Left to itself UCX sends it over TCP eagerly,
    # with a copy at either end: 64 MiB of such blocks then take 1.6 times as long.
    "RNDV_THRESH": "32k",
    # Without these an endpoint that reports its peer's death may not use shared memory, and goes over TCP on one host.
    "POSIX_ERROR_HANDLING": "y",
    "SYSV_ERROR_HANDLING": "y",
    # UCX's own keepalive tells us nothing: our connection ends with the peer's process, and what makes no progress is
    # given up. Over RDMA it has a lane of datagrams, by which UCX then also connects; UCX 1.13 ends the process ("got
    # REQ message") when such an endpoint is closed before its peer has answered. Without it the datagrams only help to
    # connect, and UCX lets go of what they have not sent.
    "KEEPALIVE_INTERVAL": "inf",
}
PROCESS_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        # UCX logs to standard output, and what it logs as errors are the deaths of peers, which we report ourselves.
        "LOG_LEVEL": "fatal",
        # It takes what was allocated before UCX was opened for host memory, and a pool on a GPU always is. Without it
        # UCX asks the driver; only when memory is registered, for our messages say which kind they are of.
        "MEMTYPE_CACHE": "n",
    }
)
"""Of all contexts of the process."""


def settings(environment: Mapping[str, str] | None = None, *, tls: str = "") -> dict[str, str]:
    """What to set: ours, but for what the user has set in the environment (``UCX_...``), which UCX reads itself.

    Args:
        environment: the process's by default.
        tls: what UCX may go by, whatever the environment says; empty leaves it to that.
    """
    found = os.environ if environment is None else environment
    wanted = {name: value for name, value in SETTINGS.items() if f"UCX_{name}" not in found}
    return {**wanted, "TLS": tls} if tls else wanted


def without_peer_copies(tls: str, environment: Mapping[str, str] | None = None) -> str:
    """``tls``, or what the environment says, less that by which another process's GPU reads or writes our GPU's memory.

    The end of a worker of ours would not end such a copy. Our own small pieces need UCX's ``cuda_copy``.
    """
    found = os.environ if environment is None else environment
    wanted = tls or found.get("UCX_TLS", "")
    names = [name for name in wanted.removeprefix("^").split(",") if name]
    if wanted.startswith("^"):
        return "^" + ",".join(dict.fromkeys([*names, "cuda_ipc"]))
    if not names or "all" in names:
        return "^cuda_ipc"
    kept = [name for name in names if name not in ("cuda", "cuda_ipc")]
    return ",".join(dict.fromkeys([*kept, "cuda_copy"]))


def process_settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """What to set of the whole process: ours, but for what the user has set in the environment."""
    found = os.environ if environment is None else environment
    return {name: value for name, value in PROCESS_SETTINGS.items() if f"UCX_{name}" not in found}
