"""Whether a process still does anything."""

from __future__ import annotations

import psutil


def runs(pid: int) -> bool:
    """False also for one that has ended and whose parent has not yet asked how."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
