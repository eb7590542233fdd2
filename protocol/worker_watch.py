"""Who looks on at the edges of a worker: what it hears and says, and how far it gets. Nothing is decided by it."""

from __future__ import annotations

from protocol.ids import Peer, RequestKey
from protocol.messages import Message, WorkerLoad


class WorkerWatch:
    """One that looks away; others override what they want to see. Called on the worker's event loop."""

    def received(self, peer: Peer, message: Message) -> None:
        """A message came from a router or another worker."""

    def sent(self, peer: Peer, message: Message) -> None:
        """A message goes to a router or another worker."""

    def computed(self, key: RequestKey, tokens: int) -> None:
        """The first ``tokens`` of a prompt are computed."""

    def shipped(self, key: RequestKey, transport: str, nbytes: int, seconds: float) -> None:
        """A ship of a prompt's blocks, which took ``seconds``, was acknowledged."""

    def tick(self) -> None:
        """Time passed."""

    def told(self, load: WorkerLoad) -> WorkerLoad:
        """``load``, with what the watch itself has counted."""
        return load
