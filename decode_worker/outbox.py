"""What the last step gave, on its way to the routers: it goes out while the next step computes.

The engine stands still between two steps, and need not do so for the encoding and sending of messages. Whatever could
tell a router of a sequence's later fate sends what is here first, so that a router hears of things in their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from decode_worker.step import Output
from protocol.ids import Peer
from protocol.messages import Message


class Outbox:
    """See the module.

    Args:
        send: sends a message to a router.

    Attributes:
        turns: outputs that went through here.
        tokens: in them.
    """

    def __init__(self, send: Callable[[Peer, Message], object]) -> None:
        self.turns = 0
        self.tokens = 0
        self._send = send
        self._outputs: list[Output] = []

    def put(self, outputs: Iterable[Output]) -> None:
        """Keep the outputs of a step."""
        self._outputs += outputs

    def send(self) -> None:
        """Send all that is here."""
        now = time.monotonic()
        for output in self._outputs:
            sequence = output.sequence
            self.turns += 1
            self.tokens += len(output.draws)
            self._send(sequence.router, output.message(now))
            sequence.times = None
        self._outputs.clear()
