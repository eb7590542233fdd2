"""Books with a planted fault each, which the walk and the search must find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kv_transfer import instructions as do
from kv_transfer.imports import ImportBook
from kv_transfer.lease import LeaseBook
from kv_transfer.lease_state import Layers, Lease
from protocol.errors import KVFerryError
from protocol.ids import Peer, RequestKey
from protocol.messages import Handover, Renew


class ReleasesInFlight(LeaseBook):
    """Does not wait for the ships of a lease that closes."""

    def _close(self, lease: Lease, *args: object, **kwargs: object) -> list[do.Instruction]:
        lease.in_flight.clear()
        return super()._close(lease, *args, **kwargs)  # type: ignore[arg-type]


class HasNoFence(LeaseBook):
    """Takes every sender for the reader."""

    def _is_reader(self, lease: Lease, sender: Peer) -> bool:
        return True


class AlwaysAnswers(LeaseBook):
    """Gives signs of life for a lease that can only end when the reader gives up."""

    def renew(self, sender: Peer, message: Renew, now: float) -> list[do.Instruction]:
        return super().renew(sender, message, now) or [do.Send(sender, message)]


class ShipsWhatIsNotComputed(LeaseBook):
    """Takes a block for complete when its first layers are."""

    def computed(
        self, key: RequestKey, blocks: Sequence[int], now: float, *, layers: Layers | None = None
    ) -> list[do.Instruction]:
        lease = self._find(key)
        known = lease is not None and set(blocks) <= set(lease.source)
        return [] if known else super().computed(key, blocks, now)


class ShipsLayersTwice(LeaseBook):
    """Forgets, when a block is complete, which of its layers have shipped."""

    def computed(
        self, key: RequestKey, blocks: Sequence[int], now: float, *, layers: Layers | None = None
    ) -> list[do.Instruction]:
        lease = self._find(key)
        if lease is not None and layers is None:
            lease.shipped_layers = 0
        return super().computed(key, blocks, now, layers=layers)


class SpeaksForItsReader(LeaseBook):
    """Tells of a ship that failed as if the reader did not answer for the request already."""

    def ship_failed(self, key: RequestKey, ship_id: int, error: KVFerryError, now: float) -> list[do.Instruction]:
        told = super().ship_failed(key, ship_id, error, now)
        return [replace(each, handed_over=False) if isinstance(each, do.Failed) else each for each in told]


class LeavesItsReaderAlone(LeaseBook):
    """Says of a ship that failed after the hand-over to the reader alone."""

    def ship_failed(self, key: RequestKey, ship_id: int, error: KVFerryError, now: float) -> list[do.Instruction]:
        told = super().ship_failed(key, ship_id, error, now)
        return [each for each in told if not (isinstance(each, do.Failed) and each.handed_over)]


class CommitsOnTheHandover(ImportBook):
    """Takes the hand-over for a promise that everything has landed."""

    def handover(self, sender: Peer, message: Handover, now: float) -> list[do.Instruction]:
        item = self._find(message.key)
        if item is not None and item.grant is not None and message.ticket == item.grant.ticket:
            item.landed_blocks, item.landed_bytes = item.granted_blocks, item.granted_bytes
        return super().handover(sender, message, now)


class FreesWithTheWindowOpen(ImportBook):
    """Gives the blocks of a failed import back before its window is quiesced."""

    def _drop(self, *args: object, **kwargs: object) -> list[do.Instruction]:
        dropped = super()._drop(*args, **kwargs)  # type: ignore[arg-type]
        return [do.FreeBlocks(each.key) if isinstance(each, do.Quarantine) else each for each in dropped]

    def quiesced(self, ticket: bytes, now: float) -> list[do.Instruction]:
        return [each for each in super().quiesced(ticket, now) if not isinstance(each, do.FreeBlocks)]


class CommitsWithTheWindowOpen(ImportBook):
    """Commits as soon as everything is there, without closing the window first."""

    def _judge(self, *args: object) -> list[do.Instruction]:
        judged = super()._judge(*args)  # type: ignore[arg-type]
        if not judged or not isinstance(judged[0], do.CloseWindow):
            return judged
        return [*super().quiesced(judged[0].ticket, 0.0), *judged]
