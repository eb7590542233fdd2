"""Runs the checks. Those that load libraries of others each have a process of their own, some at a time.

A check that raises, crashes, hangs or prints nonsense becomes a finding of its name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec
import psutil

from cluster.doctor.cluster_file import examine_keys, examine_memory, examine_model, examine_ports
from cluster.doctor.finding import Finding
from cluster.doctor.gpudirect import examine_gpudirect
from cluster.doctor.host import (
    examine_clock,
    examine_limits,
    examine_ownership,
    examine_python,
    examine_shared_memory,
)
from cluster.doctor.kernels import examine_kernels
from cluster.doctor.libraries import examine_dependencies, examine_ray, examine_torch, examine_triton
from cluster.doctor.rdma import examine_rdma
from cluster.doctor.transports import SCHEMES, examine_transport
from cluster.doctor.wish import Wish

Check = Callable[[Wish], list[Finding]]

PATIENCE = 120.0
BUILD_PATIENCE = 600.0
"""Of a check that may compile the kernels first."""
AT_ONCE = 3

INLINE: Mapping[str, Check] = MappingProxyType(
    {
        "python": examine_python,
        "packages": examine_ownership,
        "dependencies": examine_dependencies,
        "limits": examine_limits,
        "shared memory": examine_shared_memory,
        "clock": examine_clock,
        "rdma": examine_rdma,
        "ports": examine_ports,
        "keys": examine_keys,
        "model": examine_model,
    }
)
"""Checks that load nothing."""
ISOLATED: Mapping[str, Check] = MappingProxyType(
    {
        "torch": examine_torch,
        "triton": examine_triton,
        "ray": examine_ray,
        "cpu kernels": examine_kernels,
        **{scheme: partial(examine_transport, scheme) for scheme in SCHEMES},
        "gpudirect": examine_gpudirect,
        "memory": examine_memory,
    }
)
"""Checks that load libraries of others."""
ORDER = (
    *("python", "packages", "dependencies", "torch", "triton", "ray", "cpu kernels"),
    *("limits", "shared memory", "clock", "rdma", *SCHEMES, "gpudirect", "ports", "keys", "model", "memory"),
)


def examine(wish: Wish, done: Callable[[str], None] = lambda name: None) -> tuple[Finding, ...]:
    """Every finding, in order; ``done`` is told of each check that has ended, in any thread."""
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="doctor") as pool:
        running: dict[str, Future[list[Finding]]] = {name: pool.submit(isolated, name, wish) for name in ISOLATED}
        for name, future in running.items():
            future.add_done_callback(partial(_tell, done, name))
        try:
            inline = {name: guarded(name, check, wish) for name, check in INLINE.items()}
            found = inline | {name: future.result() for name, future in running.items()}
        except BaseException:
            # Ctrl-C ends the processes that run; no further ones are to start.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple(finding for name in ORDER for finding in found[name])


def guarded(name: str, check: Check, wish: Wish) -> list[Finding]:
    """What the check finds, or that it could not be made."""
    try:
        return check(wish)
    except Exception as error:
        return [_failed(name, f"{type(error).__name__}: {error}")]


def isolated(name: str, wish: Wish, patience: float | None = None) -> list[Finding]:
    """What a check of :data:`ISOLATED` finds in a process of its own."""
    patience = patience or (BUILD_PATIENCE if name == "cpu kernels" else PATIENCE)
    # The package that this process runs is the one to be examined, whatever folder the user stands in.
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, str(Path(__file__).resolve().parents[2])])}
    command = [sys.executable, "-P", "-m", "cluster.doctor", name]
    with subprocess.Popen(  # noqa: S603  ourselves
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        try:
            output, complaint = child.communicate(msgspec.json.encode(wish), timeout=patience)
        except subprocess.TimeoutExpired:
            return [_failed(name, f"no answer within {patience:g} s")]
        finally:
            _end(child)
    try:
        # Before it, libraries may have printed what they like.
        return msgspec.json.decode(output.splitlines()[-1], type=list[Finding])
    except (msgspec.DecodeError, IndexError):
        last = complaint.decode(errors="replace").strip().splitlines()[-1:]
        return [_failed(name, ": ".join([_ending(child.returncode), *last]))]


def _tell(done: Callable[[str], None], name: str, _: Future[list[Finding]]) -> None:
    done(name)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    # A compiler may be at work below it.
    below = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    for process in below:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    child.communicate()


def _ending(status: int) -> str:
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _failed(name: str, why: str) -> Finding:
    return Finding(
        check=name, verdict="broken", said=f"the check could not be made: {why[:500]}", fix="see what it says"
    )
