"""A Ray node of our own, for one cluster on one machine.

Life cycle: :func:`start_node` makes a folder and starts the daemon (:mod:`cluster.node_daemon`) in a session of its
own; :func:`connect` makes this process a Ray driver of it; :func:`stop_node` ends exactly its processes and removes the
folder. No other Ray cluster on the machine is touched.

Ray's ports are open to the network, so each node has an access token of its own.
"""

from __future__ import annotations

import importlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from cluster.config import RaySection
from cluster.node_daemon import ORDER_FILE, RAY_FOLDER, READY_FILE, NodeOrder, NodeReady
from cluster.processes import NODE_VARIABLE, end_node_processes, node_processes
from cluster.signals import kept_handlers
from cluster.state import NodeState, ProcessMark
from protocol.errors import ClusterError, StartFailed

MAX_FOLDER_LENGTH = 30
"""Ray adds 70 characters to the folder for its sockets, and a socket's path holds 107."""
LOG_FILE = "daemon.log"
LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 8192
STOP_GRACE_SECONDS = 15.0
CREDENTIALS = "~/.ray/auth_token"
REACH_SECONDS = 5.0
"""For a machine to take a connection; Ray itself would try for ten minutes."""

_DAEMON_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # An actor with no GPU of its own sees what its environment says, not an emptied list of devices.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Our actors bring their own processes; idle ones in advance only cost memory.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


def start_node(section: RaySection, started: Callable[[NodeState], None], *, timeout: float = 60.0) -> NodeState:
    """Start a node; ``started`` is told of it at once, before it is ready, so that it can be recorded.

    Raises:
        StartFailed: it was not ready within ``timeout`` seconds, or ended; with the end of its log. Nothing is left.
    """
    folder = _make_folder()
    state = NodeState(token=secrets.token_hex(32), temp_dir=str(folder))
    try:
        order = NodeOrder(cpus=section.cpus, gpus=section.gpus, object_store_memory=section.object_store_memory)
        (folder / ORDER_FILE).write_bytes(msgspec.json.encode(order))
        daemon = ProcessMark.of(_spawn(folder, state.token))
        state = msgspec.structs.replace(state, daemon=daemon)
        started(state)
        address = _await_ready(folder, daemon, timeout)
    except BaseException:
        stop_node(state)
        raise
    return msgspec.structs.replace(state, address=address)


def stop_node(state: NodeState) -> None:
    """End the node's processes and remove its folder; no error when it is gone already, or was never ours.

    Raises:
        ClusterError: a process outlived being killed; names it.
    """
    if not state.owned:
        return
    left = end_node_processes(state.temp_dir, state.daemon, grace=STOP_GRACE_SECONDS)
    shutil.rmtree(state.temp_dir, ignore_errors=True)
    if left:
        raise ClusterError(f"processes {left} of the Ray node in {state.temp_dir} outlived being killed")


def node_alive(state: NodeState) -> bool:
    """Whether our own node's daemon runs; a joined cluster is taken to be alive."""
    return not state.owned or (state.daemon is not None and state.daemon.alive())


def node_pids(state: NodeState) -> list[int]:
    """Pids of our own node's processes."""
    return sorted(process.pid for process in node_processes(state.temp_dir)) if state.owned else []


@contextmanager
def connect(state: NodeState, namespace: str) -> Iterator[Any]:
    """The ``ray`` module, connected as a driver; disconnected at the end.

    Raises:
        ClusterError: the cluster cannot be reached, or this process is connected to one already.
    """
    with _environment(_driver_environment(state)):
        import ray

        if ray.is_initialized():
            raise ClusterError("this process is connected to a Ray cluster already")
        _check_reachable(state.address)
        _read_token_again()
        try:
            with kept_handlers():
                ray.init(
                    address=state.address or "auto",
                    namespace=namespace,
                    log_to_driver=False,
                    configure_logging=False,
                    logging_level="ERROR",
                )
        except Exception as error:
            known = state.token or _token_here()
            lacking = "" if known else f"; one that asks for a token wants its head's in {CREDENTIALS} here"
            raise ClusterError(f"cannot connect to Ray at {state.address or 'auto'}: {error}{lacking}") from error
        try:
            yield ray
        finally:
            with kept_handlers():
                ray.shutdown()


def log_tail(state: NodeState, pid: int) -> str:
    """The last lines that a worker process of our own node wrote to its error output, or ""."""
    if not state.owned:
        return ""
    for file in Path(state.temp_dir).glob(f"{RAY_FOLDER}/session_latest/logs/worker-*-{pid}.err"):
        return _tail(file)
    return ""


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # Ray looks for one of this machine
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise ClusterError(f"no Ray answers at {address}: {error}") from error


def _make_folder() -> Path:
    base = Path("/tmp")  # noqa: S108  mkdtemp below makes a private folder; $TMPDIR may be too long for socket paths
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix="kvf-", dir=base)).resolve()
    if len(str(folder)) > MAX_FOLDER_LENGTH:
        folder.rmdir()
        raise StartFailed(f"the temporary folder {base} is too long for Ray's sockets; use a shorter TMPDIR")
    return folder


def _driver_environment(state: NodeState) -> dict[str, str]:
    wanted = {"RAY_USAGE_STATS_ENABLED": "0"}
    if state.token:
        wanted |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": state.token}
    elif _token_here():
        # Ray itself shows a token that is there only from release 2.60 on.
        wanted["RAY_AUTH_MODE"] = os.environ.get("RAY_AUTH_MODE", "token")
    return wanted


def _token_here() -> bool:
    """Whether there is a token for the clusters of others, where Ray looks for one."""
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or CREDENTIALS).expanduser()
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or file.is_file()


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _read_token_again() -> None:
    # Ray reads mode and token once per process, at the first use; this process may have spoken to another node before.
    internals = importlib.import_module("ray._raylet")
    if hasattr(internals, "AuthenticationTokenLoader"):  # a Ray from before there were tokens has none
        internals.Config.initialize("")
        internals.AuthenticationTokenLoader.instance().reset_cache()


def _spawn(folder: Path, token: str) -> int:
    environment = os.environ | _DAEMON_ENVIRONMENT | {NODE_VARIABLE: str(folder)}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    environment.pop("RAY_ADDRESS", None)
    log = str(folder / LOG_FILE)
    # Not subprocess: the daemon shall outlive this process, and nobody waits for it then.
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "cluster.node_daemon", str(folder)],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def _await_ready(folder: Path, daemon: ProcessMark, timeout: float) -> str:
    ready = folder / READY_FILE
    deadline = time.monotonic() + timeout
    while not ready.exists():
        if not daemon.alive():
            raise StartFailed(f"the Ray node ended at its start: {_tail(folder / LOG_FILE)}")
        if time.monotonic() > deadline:
            raise StartFailed(f"the Ray node was not ready in {timeout:g} s: {_tail(folder / LOG_FILE)}")
        time.sleep(0.02)
    return msgspec.json.decode(ready.read_bytes(), type=NodeReady).address


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - LOG_TAIL_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if line.strip()][-LOG_TAIL_LINES:])
