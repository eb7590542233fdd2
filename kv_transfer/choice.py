"""Which transport two workers use: the best that both have and that reaches from one to the other.

A decode worker listens by every transport it can and names all of its addresses in each grant; the prefill worker picks
one of them. ``auto`` leaves the choice to them; the name of a scheme leaves none, but for ``ucx``: where that cannot be
built ``ucxx`` stands in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kv_transfer.memory import DeviceMemory
from kv_transfer.transport import (
    ON_DEVICES,
    SCHEMES,
    OnBroken,
    OnLanded,
    Receiver,
    TransportConfig,
    Window,
    make_receiver,
    why_not_on_device,
    why_unreachable,
    why_unusable,
)
from protocol.errors import ChannelLost, ConfigError, UnknownTransport

AUTO = "auto"
PREFERENCE = ("shm", "tcp")
"""Schemes that ``auto`` uses between host memories, best first."""
STANDING_IN: Mapping[str, tuple[str, ...]] = MappingProxyType({AUTO: ("cuda_ipc", *PREFERENCE), "ucx": ("ucx", "ucxx")})
"""Schemes that a mode may use, best first; any other mode is the one scheme that it names."""
UNPINNED = frozenset({AUTO, *PREFERENCE, "inproc"})
"""Modes by which nothing pins a receiver's memory: its pages may go and come again."""
MODES = (AUTO, *sorted(SCHEMES))
GPUDIRECT_BY = "ucx"
"""The scheme that moves a GPU's memory between hosts without passing that of a host."""
MAX_REMEMBERED = 4096
"""Receivers whose choice is remembered; above that all are forgotten and chosen anew."""

logger = logging.getLogger(__name__)


class Receivers(Receiver):
    """Several transports that write one memory, as one receiver.

    Life cycle: as of a receiver; each window is open, and closed, in all of them.
    """

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self._receivers = tuple(receivers)

    @property
    def address(self) -> str:
        """Of the first of them."""
        return self._receivers[0].address

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of each of them."""
        return tuple(address for receiver in self._receivers for address in receiver.addresses)

    def open(self, window: Window, on_landed: OnLanded, on_broken: OnBroken) -> None:
        """See :meth:`Receiver.open`. What the first accepts the others do, for they have the same windows."""
        for receiver in self._receivers:
            receiver.open(window, on_landed, on_broken)

    async def close_window(self, ticket: bytes) -> None:
        """See :meth:`Receiver.close_window`."""
        for receiver in self._receivers:
            await receiver.close_window(ticket)

    async def close(self) -> None:
        """See :meth:`Receiver.close`."""
        for receiver in self._receivers:
            await receiver.close()


def listen(mode: str, host: str, memory: memoryview, config: TransportConfig) -> Receiver:
    """A receiver by the transport ``mode``, or by every one that works here of those that the mode may use.

    Args:
        mode: a scheme, or ``auto``.
        host: address that senders on other hosts reach this one at.
        memory: writable.
        config: of each transport.

    Raises:
        UnknownTransport: there is no such transport.
        ConfigError: not one can be used here.
    """
    schemes = schemes_of(mode)
    if len(schemes) > 1:
        schemes = tuple(scheme for scheme in schemes if scheme not in ON_DEVICES)
    if len(schemes) == 1:
        return make_receiver(_bind(mode, host), memory, config)
    receivers: list[Receiver] = []
    reasons: list[str] = []
    for scheme in schemes:
        try:
            receivers.append(make_receiver(_bind(scheme, host), memory, config))
        except ConfigError as error:
            reasons.append(f"{scheme}: {error.message}")
            # What only stands in is not missed where the other one works.
            level = logging.INFO if mode != AUTO and receivers else logging.WARNING
            logger.log(level, "not listening by %s: %s", scheme, error.message)
    if not receivers:
        raise ConfigError("no transport can be used here: " + "; ".join(reasons), field="transport")
    return Receivers(receivers)


def listen_on_device(mode: str, host: str, memory: DeviceMemory, config: TransportConfig) -> Receiver | None:
    """A receiver into memory of a device, by the best scheme of ``mode`` that takes it there; None where none does.

    Args:
        mode: a scheme, or ``auto``.
        host: address that senders on other hosts reach this one at.
        memory: of the pool.
        config: of each transport.

    Raises:
        ConfigError: the mode is for devices alone, or GPUDirect is to be used in any case, and it cannot be here.
    """
    for scheme in schemes_of(mode):
        reason = why_not_on_device(scheme, memory, config)
        if reason is None:
            try:
                return make_receiver(_bind(scheme, host), memory, config)
            except ConfigError as error:
                if mode in ON_DEVICES:
                    raise
                reason = error.message
                logger.warning("not listening by %s on the GPU: %s", scheme, reason)
        if scheme == GPUDIRECT_BY:
            do_without_gpudirect(reason, config)
    return None


def do_without_gpudirect(reason: str, config: TransportConfig) -> None:
    """Say that a GPU's KV passes host memory though it is to go by RDMA, and why.

    Raises:
        ConfigError: GPUDirect is to be used in any case.
    """
    if config.gpudirect == "on":
        raise ConfigError(f"gpudirect 'on' cannot be: {reason}", field="gpudirect")
    if config.gpudirect == "auto":
        logger.warning("KV passes pinned host memory on its way from or to the GPU: %s", reason)


def check_gpudirect(mode: str, memory: object, config: TransportConfig) -> None:
    """Refuse what shows before anything is tried, where GPUDirect is to be used in any case.

    Args:
        mode: a scheme, or ``auto``.
        memory: of the pool.
        config: of the transports.

    Raises:
        ConfigError: names what is in the way.
    """
    if config.gpudirect != "on":
        return
    if mode != GPUDIRECT_BY:
        do_without_gpudirect(f"it is a matter of transport {GPUDIRECT_BY!r}, and this is {mode!r}", config)
    if not isinstance(memory, DeviceMemory):
        do_without_gpudirect("the pool is on no CUDA device", config)


def schemes_of(mode: str) -> tuple[str, ...]:
    """The schemes that a mode may use, best first."""
    return STANDING_IN.get(mode, (mode,))


def _bind(scheme: str, host: str) -> str:
    return f"{scheme}://*" if scheme in ("inproc", "shm", "cuda_ipc") else f"{scheme}://{host}:0"


class Chooser:
    """Picks one of a receiver's addresses.

    Args:
        mode: a scheme, or ``auto``.
        unusable: why a scheme cannot be used from here, whatever the receiver, by scheme.
        reach: says why an address cannot be reached; None when it can, or when that shows only later.
        lacks: says why a scheme cannot be used on this machine; asked where another one stands in for it.

    Attributes:
        fallbacks: how often a better transport was offered and another one taken, once per receiver.

    Raises:
        ConfigError: the mode cannot be used from here.
    """

    def __init__(
        self,
        mode: str,
        unusable: dict[str, str] | None = None,
        reach: Callable[[str], str | None] = why_unreachable,
        lacks: Callable[[str], str | None] = why_unusable,
    ) -> None:
        self._schemes = schemes_of(mode)
        self._unusable = dict(unusable or {})
        if mode != AUTO and len(self._schemes) > 1:
            self._unusable |= {scheme: why for scheme in self._schemes if (why := lacks(scheme)) is not None}
        if mode != AUTO and all(scheme in self._unusable for scheme in self._schemes):
            reasons = "; ".join([self._unusable[scheme] for scheme in self._schemes])
            raise ConfigError(f"transport {mode!r} cannot be used: {reasons}", field="transport")
        self._mode = mode
        self._reach = reach
        self._chosen: dict[tuple[str, ...], str] = {}
        self._refused: dict[str, str] = {}
        self._told: set[tuple[str, ...]] = set()
        self.fallbacks = 0

    def choose(self, addresses: tuple[str, ...]) -> str:
        """The address to ship to; the same one until :meth:`forget`.

        Raises:
            UnknownTransport: the receiver offers no transport that may be used; lists its addresses.
            ChannelLost: it does, and none can be reached; names the reasons.
        """
        chosen = self._chosen.get(addresses)
        if chosen is None:
            if len(self._chosen) >= MAX_REMEMBERED:
                self._chosen.clear()
                self._told.clear()
                self._refused.clear()
            chosen = self._chosen[addresses] = self._pick(addresses)
        return chosen

    def forget(self, addresses: tuple[str, ...]) -> None:
        """Choose anew next time: what was chosen failed."""
        self._chosen.pop(addresses, None)

    def avoid(self, address: str, reason: str) -> None:
        """Never choose this address again: who is there cannot take what we offer by this transport."""
        if len(self._refused) >= MAX_REMEMBERED:
            self._refused.clear()
        self._refused[address] = reason
        self._chosen = {offered: chosen for offered, chosen in self._chosen.items() if chosen != address}

    def _pick(self, addresses: tuple[str, ...]) -> str:
        offered = {address.partition("://")[0]: address for address in reversed(addresses)}
        wanted = [scheme for scheme in self._schemes if scheme in offered]
        if not wanted:
            raise UnknownTransport(
                f"transport {self._mode!r} is wanted here, the decode worker offers {', '.join(addresses)}",
                field="transport",
            )
        reasons: list[str] = []
        for scheme in wanted:
            address = offered[scheme]
            reason = self._unusable.get(scheme) or self._refused.get(address) or self._reach(address)
            if reason is None:
                self._tell(addresses, address, reasons)
                return address
            reasons.append(f"{scheme}: {reason}")
        raise ChannelLost(f"no transport reaches the decode worker: {'; '.join(reasons)}")

    def _tell(self, addresses: tuple[str, ...], chosen: str, reasons: Sequence[str]) -> None:
        if addresses in self._told:
            return
        self._told.add(addresses)
        if reasons:
            self.fallbacks += 1
            logger.warning("KV goes to %s, not by a better transport: %s", chosen, "; ".join(reasons))
        else:
            logger.info("KV goes to %s", chosen)
