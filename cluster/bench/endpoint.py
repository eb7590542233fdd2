"""Makes a transport's two ends for a benchmark, and says why where it cannot."""

from __future__ import annotations

import platform
from pathlib import Path

from cluster.bench.memory import Pool
from kv_transfer.transport import Receiver, Sender, TransportConfig, make_receiver, make_sender
from protocol.errors import ConfigError

WITHIN_ONE_PROCESS = ("inproc",)
NAMED = ("shm", "cuda_ipc")
"""Schemes whose addresses are names on this machine, a fresh one for ``*``."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def bind_address(scheme: str, host: str) -> str:
    """Where a receiver of the transport takes a free address that peers of ``host`` reach."""
    if scheme in NAMED:
        return f"{scheme}://*"
    return f"{scheme}://[{host}]:0" if ":" in host else f"{scheme}://{host}:0"


def bound_receiver(scheme: str, host: str, memory: memoryview, config: TransportConfig) -> Receiver:
    """A receiver at ``host``.

    Raises:
        KVFerryError: there can be none here; says why.
    """
    _refuse_within_one_process(scheme)
    try:
        return make_receiver(bind_address(scheme, host), memory, config)
    except (ImportError, OSError) as error:
        raise ConfigError(f"{scheme} does not work here: {error}", field="transports") from error


def ready_sender(scheme: str, pool: Pool, config: TransportConfig) -> Sender:
    """A sender; raises as :func:`bound_receiver`."""
    _refuse_within_one_process(scheme)
    try:
        return make_sender(scheme, pool.view, config, descriptor=pool.descriptor)
    except (ImportError, OSError) as error:
        raise ConfigError(f"{scheme} does not work here: {error}", field="transports") from error


def host_identity() -> str:
    """Equal in two processes exactly when they run on one machine, as far as can be told."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def _refuse_within_one_process(scheme: str) -> None:
    if scheme in WITHIN_ONE_PROCESS:
        raise ConfigError(f"{scheme} works within one process only", field="transports")
