"""The senders of one memory: one for each transport that was asked for."""

from __future__ import annotations

from kv_transfer.memory import DeviceMemory
from kv_transfer.transport import Sender, TransportConfig, make_sender, scheme_of


class Senders:
    """Makes a sender when an address first needs one.

    Life cycle: as of a sender, for all of them.

    Args:
        memory: what they read.
        config: of each transport.
        descriptor: of the sealed memfd that ``memory`` is the whole of, where it is one.
    """

    def __init__(self, memory: memoryview | DeviceMemory, config: TransportConfig, descriptor: int | None) -> None:
        self._memory = memory
        self._config = config
        self._descriptor = descriptor
        self._senders: dict[str, Sender] = {}

    def find(self, address: str) -> Sender:
        """The sender that reaches ``address``.

        Raises:
            UnknownTransport: no transport has its scheme; lists the known ones.
            ConfigError: the memory is not shared, and the transport needs that.
        """
        scheme = scheme_of(address)
        if scheme not in self._senders:
            self._senders[scheme] = make_sender(scheme, self._memory, self._config, descriptor=self._descriptor)
        return self._senders[scheme]

    async def abort(self, ticket: bytes) -> None:
        """See :meth:`Sender.abort`."""
        for sender in self._senders.values():
            await sender.abort(ticket)

    async def close(self) -> None:
        """See :meth:`Sender.close`."""
        for sender in self._senders.values():
            await sender.close()
