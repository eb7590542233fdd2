"""The command's standard output, which is for its answer alone: programs read it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

OUTPUT, ERRORS = 1, 2


@contextmanager
def kept_for_the_answer() -> Iterator[None]:
    """Send what is written to standard output meanwhile, past Python too, to the error output: Ray's remarks."""
    sys.stdout.flush()
    kept = os.dup(OUTPUT)
    os.dup2(ERRORS, OUTPUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, OUTPUT)
        os.close(kept)
