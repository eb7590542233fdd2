"""The machine that measures."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec
import psutil


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the measuring process ran."""

    system: str
    processor: str
    cores: int
    memory_bytes: int
    python: str


def this_machine() -> Machine:
    """This one."""
    return Machine(
        system=platform.platform(),
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
