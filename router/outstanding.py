"""This router's own unfinished work, by worker: what the workers' heartbeats do not show yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from protocol.ids import Peer


class Outstanding:
    """Charges of each live request on the workers it runs on: prompt tokens on prefill, sequences on decode.

    Life cycle of a request here: charged anew at each change of its state, with nothing at its end.
    """

    def __init__(self) -> None:
        self._by_request: dict[str, Mapping[Peer, int]] = {}
        self._by_peer: Counter[Peer] = Counter()

    @property
    def by_peer(self) -> Mapping[Peer, int]:
        """Sum of all charges on each worker; one with none is left out."""
        return self._by_peer

    def charge(self, request_id: str, charges: Mapping[Peer, int]) -> None:
        """Put ``charges`` in place of what the request was charged before."""
        for peer, amount in self._by_request.pop(request_id, {}).items():
            self._by_peer[peer] -= amount
            if not self._by_peer[peer]:
                del self._by_peer[peer]
        if charges:
            self._by_request[request_id] = charges
            self._by_peer.update(charges)
