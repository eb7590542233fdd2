"""The process that a Ray node of ours hangs on: ``python -m cluster.node_daemon FOLDER``.

Life cycle: starts Ray's processes as its children, writes ``ready.json`` into its folder, waits for SIGTERM or SIGINT,
and stops them. Ray ties its processes to this one, so they end with it even when it is killed; before it is ready that
is how it ends.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import msgspec

READY_FILE = "ready.json"
ORDER_FILE = "order.json"
RAY_FOLDER = "r"
"""Short: the path of a socket holds 107 characters."""


class NodeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the node shall offer; see :class:`cluster.config.RaySection`."""

    cpus: int | None
    gpus: int | None
    object_store_memory: int


class NodeReady(msgspec.Struct, frozen=True, kw_only=True):
    """Where the node listens: host:port of Ray's control store."""

    address: str


def serve(folder: Path) -> None:
    """Run a Ray node in ``folder`` until this process is asked to end."""
    order = msgspec.json.decode((folder / ORDER_FILE).read_bytes(), type=NodeOrder)
    import ray

    context = ray.init(
        address="local",
        num_cpus=order.cpus,
        num_gpus=order.gpus,
        object_store_memory=order.object_store_memory,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        # Ray opens its folder to everybody; inside of ours nobody else gets there.
        _temp_dir=str(folder / RAY_FOLDER),
    )
    ended = threading.Event()
    # Ray installs a handler of its own for SIGTERM; ours must be the one that runs.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ready = folder / f".{READY_FILE}"
    ready.write_bytes(msgspec.json.encode(NodeReady(address=context.address_info["gcs_address"])))
    ready.replace(folder / READY_FILE)
    ended.wait()
    ray.shutdown()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
