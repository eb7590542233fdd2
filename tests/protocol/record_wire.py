"""Records frames of every kind of message as a release writes them, for later ones to be held against.

Run once, before the wire gets a new version, with that release's packages and these strategies on the path::

    PYTHONPATH=RELEASE:tests/protocol python tests/protocol/record_wire.py tests/protocol/wire_N.frames
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from message_strategies import MESSAGES, peers

from protocol.codec import encode
from protocol.ids import Peer
from protocol.messages import Message

DRAWN, KEPT, LONGEST = 60, 3, 2000
LENGTH = struct.Struct("!I")


def recorded(file: Path) -> Iterator[bytes]:
    """The frames of a file, in order."""
    data, at = file.read_bytes(), 0
    while at < len(data):
        (size,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size + size
        yield data[at - size : at]


def frames(kind: type[Message]) -> list[bytes]:
    """Of one kind, those in which most is said."""
    found: set[bytes] = set()

    @given(peers, MESSAGES[kind])
    @settings(
        max_examples=DRAWN,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def draw(sender: Peer, body: Message) -> None:
        found.add(encode(sender, body))

    draw()
    return sorted((each for each in found if len(each) <= LONGEST), key=len)[-KEPT:]


if __name__ == "__main__":
    written = [frame for kind in MESSAGES for frame in frames(kind)]
    Path(sys.argv[1]).write_bytes(b"".join(LENGTH.pack(len(frame)) + frame for frame in written))
