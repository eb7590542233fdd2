"""Finds and ends exactly the processes of one node of ours, whoever their parent is by now.

A process belongs to a node when it was started with the node's folder in its environment, or writes its output there;
one with a title of Ray's also when it has any file there open to write. Drivers have that too, and are somebody else's.
Command lines are not asked: somebody who looks at a log file has the folder in theirs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from cluster.state import ProcessMark

NODE_VARIABLE = "KVFERRY_NODE_DIR"
"""Set, to the node's folder, in the environment of everything that a node starts."""
TITLE = "ray::"
"""What Ray's processes call themselves begins with it."""
KILL_PATIENCE_SECONDS = 10.0
POLL_SECONDS = 0.05
REAP_SECONDS = 2.0


def node_processes(folder: str) -> list[psutil.Process]:
    """The live processes of the node in ``folder`` and their descendants, this process excepted."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and _belongs(process, folder):
                # Ray's agents overwrite their environment with a title; their parent's is intact.
                found |= {one.pid: one for one in (process, *process.children(recursive=True))}
        except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, PermissionError):
            continue
    return [process for process in found.values() if _live(process)]


def end_node_processes(folder: str, daemon: ProcessMark | None, *, grace: float) -> list[int]:
    """Ask the daemon to end all; after ``grace`` seconds kill what is left.

    Returns:
        Pids that are still there some seconds after they were killed.
    """
    known = node_processes(folder)
    if daemon is not None and daemon.alive():
        _signal(psutil.Process(daemon.pid), signal.SIGTERM)
    # Without a daemon Ray's processes end by themselves, most of them at once.
    _await_end(known, grace if daemon is not None and daemon.alive() else 2.0)
    # Look again: a process may have started another one meanwhile.
    left = {process.pid: process for process in (*known, *node_processes(folder)) if _live(process)}
    for process in left.values():
        _signal(process, signal.SIGKILL)
    _await_end(list(left.values()), KILL_PATIENCE_SECONDS)
    return [process.pid for process in left.values() if _live(process)]


def _belongs(process: psutil.Process, folder: str) -> bool:
    if process.environ().get(NODE_VARIABLE) == folder:
        return True
    inside = folder.rstrip("/") + "/"
    # What Ray starts overwrites its environment with a title; once its parent is dead, only its files tell whose it is.
    titled = process.name().startswith(TITLE)
    descriptors = os.listdir(f"/proc/{process.pid}/fd") if titled else ["1", "2"]
    return any(_writes(process.pid, descriptor, inside) for descriptor in descriptors)


def _writes(pid: int, descriptor: str, inside: str) -> bool:
    """Whether a process has a file of a folder open to write it."""
    try:
        if not str(Path(f"/proc/{pid}/fd/{descriptor}").readlink()).startswith(inside):
            return False
        told = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
    except OSError:
        return False
    flags = next(line.split()[1] for line in told.splitlines() if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def _await_end(processes: list[psutil.Process], seconds: float) -> None:
    # Not psutil.wait_procs: that waits for a dead process until its parent, maybe a demo elsewhere, has asked after it.
    deadline = time.monotonic() + seconds
    while any(_live(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    # Our own children are asked after. One that is dead cannot be before the last of its threads is.
    psutil.wait_procs([process for process in processes if _ours(process)], timeout=REAP_SECONDS)


def _ours(process: psutil.Process) -> bool:
    try:
        return process.ppid() == os.getpid() and not _live(process)
    except psutil.NoSuchProcess:
        return False


def _live(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
