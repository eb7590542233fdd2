"""One process of a rival, run by the rival's own interpreter; it needs nothing of ours but the file that it is given.

Life cycle: the file is loaded -> orders, each answered -> standard input ends. Orders come as lines of JSON on standard
input, each is answered by one line. What the libraries print goes to standard error.

The file's ``Answerer(waiting)`` carries orders out; ``waiting()`` tells whether the next one is there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import sys
from types import ModuleType
from typing import Any


class Orders:
    """Lines on standard input."""

    def __init__(self) -> None:
        self._held = b""

    def waiting(self) -> bool:
        """Whether one, or the end, is there."""
        return b"\n" in self._held or bool(select.select([0], [], [], 0)[0])

    def next(self) -> dict[str, Any] | None:
        """The next; None at the end."""
        while b"\n" not in self._held:
            piece = os.read(0, 1 << 20)
            if not piece:
                return None
            self._held += piece
        line, _, self._held = self._held.partition(b"\n")
        order: dict[str, Any] = json.loads(line)
        return order


def loaded(file: str) -> ModuleType:
    """The module in ``file``."""
    spec = importlib.util.spec_from_file_location("rival", file)
    assert spec is not None, "a file of Python"
    assert spec.loader is not None, "a file of Python"
    module = importlib.util.module_from_spec(spec)
    # A rival that starts processes of its own looks for it there.
    sys.modules["rival"] = module
    spec.loader.exec_module(module)
    return module


def main(file: str) -> None:
    """Answer orders until their end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    orders = Orders()
    answerer = loaded(file).Answerer(orders.waiting)
    while (order := orders.next()) is not None:
        try:
            answer = answerer.answer(order)
        except ModuleNotFoundError as error:
            answer = {"missing": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        answerer.after(order)
    # The libraries crash when the interpreter ends in the usual way.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
