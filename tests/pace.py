"""How long things may take on a machine that is busy with others'."""

from __future__ import annotations

import os


def allowed(seconds: float) -> float:
    """``seconds`` of an idle machine, in those of one as busy as this is now."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
