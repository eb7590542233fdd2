"""Bytes of the cuda_ipc transport that are not those of shared memory, native order, every number bounded.

::

    offer     to the receiver    magic "KVCO", bytes of the pool, bytes of the allocation that it lies in, its offset
                                 there, its address in the sender's process, the device's UUID, the allocation's handle;
                                 with it, one descriptor: the ledger

Welcome, frame and answer are :mod:`kv_transfer.shm.wire`'s.

History: 1 -- first version.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kv_transfer.cuda_ipc.driver import HANDLE_BYTES, UUID_BYTES
from kv_transfer.shm.wire import MAX_POOL
from protocol.errors import MalformedFrame

LOWEST_VERSION = 1
HIGHEST_VERSION = 1
OFFER = struct.Struct(f"=4sQQQQ{UUID_BYTES}s{HANDLE_BYTES}s")
OFFER_MAGIC = b"KVCO"


@dataclass(frozen=True, slots=True)
class Offer:
    """A sender's pool, on a device.

    Attributes:
        nbytes: of the pool.
        allocation: bytes of the allocation.
        offset: of the pool in the allocation.
        address: of the pool in the sender's process.
        uuid: of the device.
        handle: of the allocation, for other processes.
    """

    nbytes: int
    allocation: int
    offset: int
    address: int
    uuid: bytes
    handle: bytes

    def pack(self) -> bytes:
        """As it is sent."""
        numbers = (self.nbytes, self.allocation, self.offset, self.address)
        return OFFER.pack(OFFER_MAGIC, *numbers, self.uuid, self.handle)


def parse_offer(data: bytes) -> Offer:
    """An offer as it came.

    Raises:
        MalformedFrame: it is none, or the pool does not lie in its allocation.
    """
    magic, nbytes, allocation, offset, address, uuid, handle = OFFER.unpack(data)
    offer = Offer(nbytes, allocation, offset, address, uuid, handle)
    if magic != OFFER_MAGIC or not 0 < offer.nbytes <= offer.allocation < MAX_POOL:
        raise MalformedFrame(f"not an offer of the cuda_ipc transport: {data[:36]!r}...")
    if offer.offset > offer.allocation - offer.nbytes:
        place = f"{offer.offset}+{offer.nbytes}"
        raise MalformedFrame(f"a pool at {place} does not lie in {offer.allocation} bytes", field="offset")
    return offer
