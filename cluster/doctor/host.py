"""The machine itself: Python, limits, shared memory, clocks."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, metadata
from itertools import pairwise
from pathlib import Path

from cluster.doctor.finding import Finding
from cluster.doctor.wish import Wish
from cluster.ownership import DISTRIBUTION, check_ownership
from protocol.errors import ConfigError

OLDEST_PYTHON = (3, 11)
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  a mount to look at, not a place for files
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
FEW_FILES = 4096
"""A connection has a descriptor on each end, and so has each thread's wake-up."""
CLOCK_READS = 2000
NEVER_BEFORE = 1_735_689_600.0
"""Seconds since the epoch at the start of 2025, before there was any kvferry."""


def judge_python(version: tuple[int, ...], implementation: str) -> Finding:
    """Whether this Python is new enough, and the one that the wheels are made for."""
    said = f"{implementation} {'.'.join(map(str, version))}"
    if version[:2] < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return Finding(check="python", verdict="broken", said=said, fix=f"install Python {wanted} or newer")
    if implementation != "cpython":
        return Finding(check="python", verdict="warning", said=f"{said}, only CPython is tested", fix="use CPython")
    return Finding(check="python", verdict="ok", said=said)


def judge_files(soft: int, hard: int) -> Finding:
    """The limit on open files; -1 is no limit."""
    said = f"{_limit(soft)} open files (at most {_limit(hard)})"
    if 0 <= soft < FEW_FILES:
        wanted = 65536 if hard < 0 or hard >= 65536 else hard
        fix = f"ulimit -n {wanted}"
        if 0 <= hard < FEW_FILES:
            fix = "raise nofile in /etc/security/limits.conf, or the container's --ulimit nofile=65536"
        return Finding(check="nofile", verdict="warning", said=f"{said}: few for many workers and streams", fix=fix)
    return Finding(check="nofile", verdict="ok", said=said)


def judge_locked(soft: int, *, rdma: bool) -> Finding:
    """The limit on locked memory in bytes, -1 for none: RDMA locks each pool that it registers."""
    said = f"{_limit(soft)}{'' if soft < 0 else ' bytes'} of locked memory"
    if soft < 0:
        return Finding(check="memlock", verdict="ok", said=said)
    if not rdma:
        return Finding(check="memlock", verdict="note", said=f"{said}; it matters with RDMA only")
    fix = "ulimit -l unlimited, memlock in /etc/security/limits.conf, or the container's --ulimit memlock=-1"
    return Finding(check="memlock", verdict="warning", said=f"{said}: a pool may not be registered for RDMA", fix=fix)


def judge_shared_memory(free: int | None, wanted: int) -> Finding:
    """Room in /dev/shm in bytes, None where there is none; Ray keeps its object store there, UCX its rings."""
    if free is None:
        said = f"there is no {SHARED_MEMORY}"
        return Finding(check="shared memory", verdict="warning", said=said, fix="mount a tmpfs there")
    said = f"{free >> 20} MiB free in {SHARED_MEMORY}"
    if free < wanted:
        fix = f"enlarge it (mount -o remount,size=1g {SHARED_MEMORY}; a container's --shm-size=1g)"
        return Finding(
            check="shared memory", verdict="warning", said=f"{said}, Ray wants {wanted >> 20} MiB of it", fix=fix
        )
    return Finding(check="shared memory", verdict="ok", said=said)


def judge_clock(reads: Sequence[float], per_read: float, wall: float, newest: float, source: str) -> Finding:
    """Whether time goes forward, is cheap to read, and is not in the past.

    Args:
        reads: of the monotonic clock, one after the other.
        per_read: seconds that one took.
        wall: seconds since the epoch, as this machine has it.
        newest: when the newest file of ours was written.
        source: of the kernel; "" where it does not say.
    """
    said = f"monotonic, {1e9 * per_read:.0f} ns a read" + (f", source {source}" if source else "")
    if any(after < before for before, after in pairwise(reads)):
        fix = "no transfer ends in time on such a machine; look into dmesg for 'clocksource'"
        return Finding(check="clock", verdict="broken", said="the monotonic clock goes backwards", fix=fix)
    if wall < max(NEVER_BEFORE, newest - 86400.0):
        date = time.strftime("%Y-%m-%d", time.gmtime(wall))
        said = f"the wall clock says {date}, before this program was installed"
        fix = "set it (timedatectl set-ntp true): a worker that starts again must have a later time than before"
        return Finding(check="clock", verdict="warning", said=said, fix=fix)
    if source in SLOW_CLOCKS:
        fix = f"echo tsc > {CLOCK_SOURCE}, if the kernel offers it"
        return Finding(check="clock", verdict="warning", said=f"{said}: slow to read", fix=fix)
    return Finding(check="clock", verdict="ok", said=said)


def examine_python(wish: Wish) -> list[Finding]:
    """The Python that this command, and so the workers, run in."""
    return [judge_python(tuple(sys.version_info[:3]), sys.implementation.name)]


def examine_ownership(wish: Wish) -> list[Finding]:
    """Whether our flat package names are ours."""
    try:
        check_ownership()
        version = metadata(DISTRIBUTION)["Version"]
    except ConfigError as error:
        return [
            Finding(
                check="packages",
                verdict="broken",
                said=error.message,
                fix=f"give {DISTRIBUTION} an environment of its own",
            )
        ]
    except PackageNotFoundError:
        said = f"{DISTRIBUTION} is not installed, only on the path"
        return [Finding(check="packages", verdict="warning", said=said, fix="pip install it into this environment")]
    return [Finding(check="packages", verdict="ok", said=f"{DISTRIBUTION} {version}, every package name is ours")]


def examine_limits(wish: Wish) -> list[Finding]:
    """Open files and locked memory."""
    from cluster.doctor.rdma import devices

    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [judge_files(*files), judge_locked(locked, rdma=bool(devices()))]


def examine_shared_memory(wish: Wish) -> list[Finding]:
    """Room for Ray's object store."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    return [judge_shared_memory(free, wish.config.ray.object_store_memory if wish.here else 0)]


def examine_clock(wish: Wish) -> list[Finding]:
    """The clocks that leases and incarnations are told by."""
    begun = time.perf_counter()
    reads = [time.monotonic() for _ in range(CLOCK_READS)]
    per_read = (time.perf_counter() - begun) / CLOCK_READS
    try:
        source = CLOCK_SOURCE.read_text().strip()
    except OSError:
        source = ""
    newest = max(path.stat().st_mtime for path in Path(__file__).parent.iterdir())
    return [judge_clock(reads, per_read, time.time(), newest, source)]


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)
