"""One check in a process of its own: its name is the argument, the wish comes in, findings go out as JSON."""

from __future__ import annotations

import os
import sys

import msgspec

from cluster.doctor.examination import ISOLATED, guarded
from cluster.doctor.wish import Wish


def main() -> None:
    """Make the check, print what it found, and end without the libraries' own endings, some of which crash."""
    name = sys.argv[1]
    wish = msgspec.json.decode(sys.stdin.buffer.read(), type=Wish)
    findings = guarded(name, ISOLATED[name], wish)
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(findings) + b"\n")
    sys.stdout.buffer.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
