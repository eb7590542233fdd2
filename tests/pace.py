"""How long things may take on a machine that is busy with others'."""

from __future__ import annotations

import os
from pathlib import Path


def allowed(seconds: float) -> float:
    """``seconds`` of an idle machine, in those of one as busy as this is now, or was in the minute that is over."""
    lately, _, _, tasks, _ = Path("/proc/loadavg").read_text().split()
    wanting = max(float(lately), int(tasks.split("/")[0]))
    return seconds * max(1.0, wanting / len(os.sched_getaffinity(0)))
