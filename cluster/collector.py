"""Python's collector of cycles, kept away from what a process keeps for its whole life.

Modules alone are some 170,000 objects in a worker, which a full collection looks through in 0.1 s: for so long no step
begins, no token goes out. While they are loaded it comes by again and again, and finds nothing.

Of a process with one service: :func:`hold` before it comes up, :func:`keep` once it is up, and so on with the next one.
"""

from __future__ import annotations

import gc


def hold() -> None:
    """From now on nothing is collected by itself; what was kept is garbage like any other once nobody has it."""
    gc.disable()
    gc.unfreeze()


def keep() -> None:
    """What there is now is never looked through again; what comes later is, as ever."""
    gc.freeze()
    gc.enable()
