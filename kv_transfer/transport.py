"""The contract that every KV transport keeps, and the registry that finds one by its URI scheme.

Life cycle of a window, on the decode side::

    open(window) -> [one on_landed per finished ship | on_broken] ... -> close_window(ticket) -> blocks are the caller's

Until ``close_window`` has returned the transport may write the window's blocks; from then on not one byte of them
changes under that ticket, whatever a slow, stopped or killed peer does later.

Life cycle of a ship, on the prefill side: the source bytes must not change from the call of ``ship`` until it returns
or raises. Every byte of a window is written at most once, by one ship. A ship writes its blocks whole, or the same band
of each; a block has landed when all of it has.
"""

from __future__ import annotations

import importlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Literal

from kv_transfer.band import Band
from kv_transfer.memory import DeviceMemory
from kv_transfer.span import Span
from protocol.errors import ConfigError, TransferError, UnknownTransport

TICKET_BYTES = 16
MIN_SECRET = 16
UCX_TLS = re.compile(r"[a-z0-9_,^\\:]{0,255}")
GpuDirect = Literal["auto", "on", "off"]
GPUDIRECT: tuple[GpuDirect, ...] = ("auto", "on", "off")
MAX_NAME = 160
NAME = re.compile(rf"[A-Za-z0-9._@-]{{1,{MAX_NAME}}}")
"""What a party of a KV connection is called: a worker's name and incarnation."""
SCHEMES: Mapping[str, str] = MappingProxyType(
    {name: f"kv_transfer.{name}" for name in ("inproc", "shm", "tcp", "ucx", "ucxx", "nixl", "cuda_ipc")}
)
"""Module of each scheme. It is imported when first asked for, and has ``receiver`` and ``sender`` functions.

The module of a scheme in SHARED has ``shared_sender`` instead of ``sender``. One whose addresses may be out of reach
has ``why_unreachable``, one that needs what may not be installed has ``why_unusable``, one that can say what it finds
on this machine has ``describe``, and one that takes memory of some devices beside that of hosts ``why_not_on_device``.
"""
SHARED = frozenset({"shm"})
"""Schemes whose senders share their memory, and need its descriptor."""
ON_DEVICES = frozenset({"cuda_ipc"})
"""Schemes between pools on devices, and no others; for the rest either end may be host memory."""


@dataclass(frozen=True, slots=True)
class Window:
    """What may be written under one ticket.

    Attributes:
        ticket: 16 bytes that the sender must show.
        blocks: destination block ids, each once.
        generations: of each block; a span for another generation is refused.
        block_bytes: bytes of one block as it arrives; block ``b`` lies at ``b * block_bytes`` of the memory.
        sender: name of the only one who may show the ticket; empty lets any do it who passes the hello.

    Raises:
        ConfigError: a value is out of bounds; names the field and the value.
    """

    ticket: bytes
    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    block_bytes: int
    sender: str = ""

    def __post_init__(self) -> None:
        if len(self.ticket) != TICKET_BYTES:
            raise ConfigError(f"ticket must be {TICKET_BYTES} bytes, got {len(self.ticket)}", field="ticket")
        if self.block_bytes < 1:
            raise ConfigError(f"block_bytes must be at least 1, got {self.block_bytes}", field="block_bytes")
        if len(self.generations) != len(self.blocks):
            counts = f"{len(self.generations)} for {len(self.blocks)} blocks"
            raise ConfigError(f"generations must be one per block, got {counts}", field="generations")
        if len(set(self.blocks)) != len(self.blocks) or min(self.blocks, default=0) < 0:
            raise ConfigError(f"blocks must be distinct and at least 0, got {self.blocks[:8]}...", field="blocks")


@dataclass(frozen=True, slots=True)
class Landed:
    """One ship call arrived whole.

    Attributes:
        ticket: of its window.
        blocks: destination block ids that are whole with it: those it wrote, unless bands of them are still to come.
        nbytes: written.
        seconds: from its first header to its last byte, on the receiver's clock.
        transport: URI scheme that it came by.
    """

    ticket: bytes
    blocks: tuple[int, ...]
    nbytes: int
    seconds: float
    transport: str = ""


@dataclass(frozen=True, slots=True)
class ShipReport:
    """One ship call, as its sender saw it: every byte was acknowledged.

    Attributes:
        nbytes: sent.
        spans: as given.
        seconds: from the call to the last acknowledgement.
    """

    nbytes: int
    spans: int
    seconds: float


OnLanded = Callable[[Landed], None]
OnBroken = Callable[[bytes, TransferError], None]


def _default_streams() -> int:
    return 2 if (os.cpu_count() or 1) > 1 else 1


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Settings that senders and receivers of all transports share.

    Attributes:
        streams: connections to one destination, for small and for large ships each, and I/O threads of one endpoint.
        timeout: seconds without progress after which a peer is given up.
        max_connections: a receiver turns further peers away.
        buffer_bytes: socket buffer that is asked of the kernel. 0 leaves it to the kernel's tuning, which grows it to
            megabytes; a size of one's own ends the tuning and is capped by ``net.core.rmem_max``.
        checksum: a sender adds a checksum to all it sends. A receiver checks each that comes, and with this set takes
            nothing without.
        secret: what both ends of a connection must know; empty lets everybody in.
        ucx_tls: what UCX may go by, as its own UCX_TLS says it ("tcp", "shm"); empty leaves that to UCX.
        gpudirect: whether RDMA reads and writes a GPU's memory itself: where it can, always, or never.
        name: of this end, told to the other and covered by the proof of the secret: a worker's name and incarnation.

    Raises:
        ConfigError: a value is out of bounds; names the field and the value.
    """

    streams: int = field(default_factory=_default_streams)
    timeout: float = 10.0
    max_connections: int = 1024
    buffer_bytes: int = 0
    checksum: bool = False
    secret: str = field(default="", repr=False)
    ucx_tls: str = ""
    name: str = ""
    gpudirect: GpuDirect = "auto"

    def __post_init__(self) -> None:
        checks = (
            ("streams", 1 <= self.streams <= 64, "in [1, 64]"),
            ("timeout", 0.0 < self.timeout <= 3600.0, "in (0, 3600]"),
            ("max_connections", 1 <= self.max_connections <= 1 << 16, "in [1, 65536]"),
            ("buffer_bytes", 0 <= self.buffer_bytes <= 1 << 30, "in [0, 2**30]"),
            ("gpudirect", self.gpudirect in GPUDIRECT, f"one of {', '.join(GPUDIRECT)}"),
            ("ucx_tls", UCX_TLS.fullmatch(self.ucx_tls) is not None, "names parted by commas"),
        )
        for name, valid, wanted in checks:
            if not valid:
                raise ConfigError(f"{name} must be {wanted}, got {getattr(self, name)!r}", field=name)
        if self.secret and len(self.secret) < MIN_SECRET:
            # Its value stays out of messages, and so out of logs.
            raise ConfigError(f"secret must be empty or at least {MIN_SECRET} characters", field="secret")
        if self.name and not NAME.fullmatch(self.name):
            raise ConfigError(f"name must be empty or match {NAME.pattern}, got {self.name!r}", field="name")


class Receiver(ABC):
    """Decode side: peers write the memory's blocks through the windows that are open.

    Life cycle: made bound, :meth:`open` and :meth:`close_window` at will, :meth:`close` once. All methods are called
    on one event loop, and callbacks come on it, never from within a call.
    """

    @property
    @abstractmethod
    def address(self) -> str:
        """URI that senders ship to."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every URI that senders may ship to, where there are several."""
        return (self.address,)

    @abstractmethod
    def open(self, window: Window, on_landed: OnLanded, on_broken: OnBroken) -> None:
        """Let ships with the window's ticket write its blocks.

        Args:
            window: what may be written.
            on_landed: called once per ship that arrived whole.
            on_broken: called with the ticket and the error when a ship was cut off in the middle of its bytes. One that
                was stopped before its first byte is not known here: an import needs its expiry.

        Raises:
            ConfigError: a block lies outside the memory.
            InvariantViolation: the ticket, or a block, belongs to a window that is still open.
            ChannelLost: the receiver is closed.
        """

    @abstractmethod
    async def close_window(self, ticket: bytes) -> None:
        """Quiesce: when this returns, nothing is written under ``ticket`` any more, ever, and no callback comes.

        May be called at any time and more than once; an unknown ticket is fine.
        """

    @abstractmethod
    async def close(self) -> None:
        """Quiesce every window, give up the address, end every thread. May be called more than once."""


class Sender(ABC):
    """Prefill side: reads the memory and writes the blocks of receivers elsewhere.

    Life cycle: made, :meth:`ship` and :meth:`abort` at will, :meth:`close` once; all on one event loop.
    """

    @abstractmethod
    async def ship(
        self,
        address: str,
        ticket: bytes,
        spans: Sequence[Span],
        generations: Sequence[tuple[int, int]],
        *,
        band: Band | None = None,
    ) -> ShipReport:
        """Write spans of the memory into a window of the receiver at ``address``.

        Returns when the receiver has acknowledged every byte. The source may change when this has returned or raised,
        not before. Cancelling it counts as :meth:`abort` of this one ship.

        Args:
            address: of the receiver.
            ticket: of the window.
            spans: together exactly the whole blocks that ``generations`` names, or one span for the band of each.
            generations: ``(destination block, generation)`` pairs.
            band: of each of the blocks that is written; None for all of it.

        Raises:
            TicketRejected: the receiver does not know the ticket from this sender, or the blocks are not the window's;
                where that is known before the first byte, nothing was written.
            ChannelLost: nobody there, connection lost, no progress for ``timeout`` seconds, aborted, or closed.
            IntegrityMismatch: the spans lie outside the memory, or are not the named blocks; or the bytes that arrived
                are not those that were sent, where checksums are on. The ship never lands then.
            VersionMismatch: the receiver speaks another version; names both.
            AuthenticationFailed: the receiver has another secret, or only one of the two has one.
        """

    @abstractmethod
    async def abort(self, ticket: bytes) -> None:
        """Stop every ship of ``ticket``, now and later; it raises :class:`~protocol.errors.ChannelLost`.

        When this returns, no byte of the memory is read for it any more. An unknown ticket is fine.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop every ship, close every connection, end every thread. May be called more than once."""


def scheme_of(address: str) -> str:
    """The scheme of a transport URI: ``"tcp"`` of ``"tcp://10.0.0.2:7000"``.

    Raises:
        UnknownTransport: there is none, or no transport has it; lists the known ones.
    """
    scheme, found, _ = address.partition("://")
    if not found or scheme not in SCHEMES:
        raise UnknownTransport(f"no transport for address {address!r}; known schemes: {', '.join(sorted(SCHEMES))}")
    return scheme


def _module(scheme: str) -> ModuleType:
    if scheme not in SCHEMES:
        raise UnknownTransport(f"no transport {scheme!r}; known schemes: {', '.join(sorted(SCHEMES))}", field="scheme")
    return importlib.import_module(SCHEMES[scheme])


def make_receiver(bind: str, memory: memoryview | DeviceMemory, config: TransportConfig | None = None) -> Receiver:
    """A receiver of the transport that ``bind`` names (``"tcp://127.0.0.1:0"``), writing ``memory``.

    It is memory of a device for a scheme in ON_DEVICES, and may be for one of which :func:`why_not_on_device` says so.

    Raises:
        UnknownTransport: no transport has that scheme; lists the known ones.
        ConfigError: the memory is read-only or not contiguous, or the address cannot be taken.
    """
    receiver: Receiver = _module(scheme_of(bind)).receiver(bind, memory, config or TransportConfig())
    return receiver


def make_sender(
    scheme: str,
    memory: memoryview | DeviceMemory,
    config: TransportConfig | None = None,
    *,
    descriptor: int | None = None,
) -> Sender:
    """A sender of the transport ``scheme`` (``"tcp"``), reading ``memory``.

    Args:
        scheme: of the receivers' addresses.
        memory: what is read; of which kind, as for :func:`make_receiver`.
        config: settings.
        descriptor: of the sealed memfd that ``memory`` is the whole of, where it is one.

    Raises:
        UnknownTransport: no transport has that scheme; lists the known ones.
        ConfigError: the memory is not contiguous, or not shared and the transport needs that.
    """
    module = _module(scheme)
    make = partial(module.shared_sender, descriptor=descriptor) if scheme in SHARED else module.sender
    sender: Sender = make(memory, config or TransportConfig())
    return sender


def why_unreachable(address: str) -> str | None:
    """Why nobody at ``address`` can be reached from this process; None when that is not known, or somebody can.

    Does not wait, and says nothing about a receiver that is there and does not answer.

    Raises:
        UnknownTransport: no transport has that scheme; lists the known ones.
    """
    check: Callable[[str], str | None] | None = getattr(_module(scheme_of(address)), "why_unreachable", None)
    return None if check is None else check(address)


def why_unusable(scheme: str) -> str | None:
    """Why nothing can be made of the transport ``scheme`` on this machine; None when something can.

    Raises:
        UnknownTransport: no transport has that scheme; lists the known ones.
    """
    check: Callable[[], str | None] | None = getattr(_module(scheme), "why_unusable", None)
    return None if check is None else check()


def why_not_on_device(scheme: str, memory: DeviceMemory, config: TransportConfig) -> str | None:
    """Why the transport ``scheme`` does not take memory of a device where it is; None where it does.

    It may still refuse it when an end is made of it, as for want of memory.

    Raises:
        UnknownTransport: no transport has that scheme; lists the known ones.
    """
    if scheme in ON_DEVICES:
        return None
    check: Callable[[DeviceMemory, TransportConfig], str | None] | None
    check = getattr(_module(scheme), "why_not_on_device", None)
    return f"{scheme} goes from and to host memory" if check is None else check(memory, config)


def describe(scheme: str) -> str:
    """What the transport says of itself on this machine, in one line; "" where it says nothing. May take seconds.

    Raises:
        UnknownTransport: no transport has that scheme; lists the known ones.
    """
    tell: Callable[[], object] | None = getattr(_module(scheme), "describe", None)
    return "" if tell is None else str(tell())
