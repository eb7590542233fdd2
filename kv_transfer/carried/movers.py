"""What a carrier does with each library: introduces itself, connects, and moves slots. Runs in the carrier's process.

Life cycle of a mover: made -> introduced -> connected -> [move -> turns until moved -> free]* -> closed.
"""

from __future__ import annotations

import asyncio
import importlib
import secrets
import struct
from abc import ABC, abstractmethod
from contextlib import suppress
from importlib import metadata
from typing import Any

import numpy as np

from kv_transfer.carried.staging import SLOT_BYTES, TOTAL_BYTES, Staging
from protocol.errors import ChannelLost

MAX_TAG = (1 << 64) - 1
BASE = struct.Struct("!Q")


class Mover(ABC):
    """See the module. No call waits for the peer, but for :meth:`connect`.

    Attributes:
        release: of the library; both ends need the same.
    """

    release: str

    @abstractmethod
    def introduction(self) -> bytes:
        """What the peer's mover must know."""

    @abstractmethod
    def connect(self, peer: bytes, key: bytes) -> None:
        """Reach the peer that introduces itself so, and shares the key."""

    @abstractmethod
    def move(self, slot: int, nbytes: int) -> None:
        """Begin to send, or receive, the first bytes of a slot."""

    @abstractmethod
    def free(self, slot: int) -> None:
        """The other end has the slot's bytes."""

    @abstractmethod
    def turn(self) -> list[int]:
        """Get on; returns the slots that have been moved. Raises what a move fails with."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether there is anything to get on with."""

    @abstractmethod
    def close(self) -> None:
        """End, as far as that can be done without waiting."""


class NixlMover(Mover):
    """NIXL: the receiver's end reads what the sender's end has registered.

    Args:
        module: of NIXL.
        staging: registered whole.
        receives: which end this is.
    """

    def __init__(self, module: str, staging: Staging, *, receives: bool) -> None:
        api = importlib.import_module(f"{module}._api")
        self.release = f"NIXL {'.'.join(_version_of(module).split('.')[:2])}"
        self._staging = staging
        self._receives = receives
        self._base = int(staging.bytes.ctypes.data)
        # Its progress thread takes the core that the copies need, and writes when nobody looks.
        self._agent: Any = api.nixl_agent(secrets.token_hex(8), api.nixl_agent_config(enable_prog_thread=False))
        self._registered = self._agent.register_memory([(self._base, TOTAL_BYTES, 0, "")], "DRAM")
        self._peer = ""
        self._peer_base = 0
        self._reading: dict[int, Any] = {}
        self._offered: set[int] = set()
        self._moved: list[int] = []

    def introduction(self) -> bytes:
        """Where the slots are, and the agent's metadata."""
        metadata_of_agent: bytes = self._agent.get_agent_metadata()
        return BASE.pack(self._base) + metadata_of_agent

    def connect(self, peer: bytes, key: bytes) -> None:
        """The reader needs to know what it reads; what is read needs nothing."""
        if self._receives:
            (self._peer_base,) = BASE.unpack(peer[: BASE.size])
            name = self._agent.add_remote_agent(peer[BASE.size :])
            self._peer = name.decode() if isinstance(name, bytes) else name

    def move(self, slot: int, nbytes: int) -> None:
        """Read a slot; at the sender's end it is there to be read from now on."""
        if not self._receives:
            self._offered.add(slot)
            self._moved.append(slot)
            return
        ours, theirs = (
            self._agent.get_xfer_descs(np.array([[base + slot * SLOT_BYTES, nbytes, 0]], np.uint64), "DRAM")
            for base in (self._base, self._peer_base)
        )
        self._reading[slot] = handle = self._agent.initialize_xfer("READ", ours, theirs, self._peer)
        self._see(slot, self._agent.transfer(handle))

    def free(self, slot: int) -> None:
        """The peer has read the slot."""
        self._offered.discard(slot)

    def turn(self) -> list[int]:
        """Ask how the reads are; at the sender's end let NIXL answer those that need its help."""
        for slot, handle in tuple(self._reading.items()):
            self._see(slot, self._agent.check_xfer_state(handle))
        if self._offered:
            self._agent.get_new_notifs()
        moved, self._moved = self._moved, []
        return moved

    def _see(self, slot: int, state: str) -> None:
        if state == "DONE":
            self._agent.release_xfer_handle(self._reading.pop(slot))
            self._moved.append(slot)
        elif state != "PROC":
            raise ChannelLost(f"NIXL could not read slot {slot}: {state}")

    @property
    def busy(self) -> bool:
        """Whether a slot is being read, by us or the peer."""
        return bool(self._reading or self._offered or self._moved)

    def close(self) -> None:
        """Let go of the agent, whose end takes its shared memory with it."""
        # What it says of requests that are still under way helps nobody.
        with suppress(Exception):
            for handle in self._reading.values():
                self._agent.release_xfer_handle(handle)
            self._agent.deregister_memory(self._registered)
        self._reading.clear()
        self._agent = None


class UcxxMover(Mover):
    """ucxx or ucx-py: tagged messages from the sender's worker to the receiver's.

    Args:
        module: ``ucxx``, or ``ucp``.
        staging: where the messages lie.
        receives: which end this is.
    """

    def __init__(self, module: str, staging: Staging, *, receives: bool) -> None:
        _load_wheel()
        self._library: Any = importlib.import_module(module)
        self._staging = staging
        self._receives = receives
        self._loop = asyncio.new_event_loop()
        self._endpoint: Any = None
        self._moves: dict[int, asyncio.Task[None]] = {}
        self._tag = 0
        # It polls in the loop, which turns only while there is something to move.
        how = {"progress_mode": "polling"} if module == "ucxx" else {"blocking_progress_mode": False}
        self._loop.run_until_complete(self._start(how))
        self.release = "UCX {}.{}".format(*self._library.get_ucx_version())

    async def _start(self, how: dict[str, Any]) -> None:
        self._library.init(**how)

    def introduction(self) -> bytes:
        """The worker's address, where messages are received."""
        return self._loop.run_until_complete(self._address()) if self._receives else b""

    async def _address(self) -> bytes:
        return bytes(self._library.get_worker_address())

    def connect(self, peer: bytes, key: bytes) -> None:
        """The sender's end makes an endpoint; the receiver's takes what comes to its worker.

        UCX takes messages from anybody who reaches that, so the first tag is one that a stranger cannot guess.
        """
        self._tag = int.from_bytes(key[:8])
        if not self._receives:
            self._loop.run_until_complete(self._reach(peer))

    async def _reach(self, peer: bytes) -> None:
        address = self._library.get_ucx_address_from_buffer(peer)
        self._endpoint = await self._library.create_endpoint_from_worker_address(address)

    def move(self, slot: int, nbytes: int) -> None:
        """Begin a message; both ends count them, and the count is the tag."""
        self._tag = (self._tag + 1) & MAX_TAG
        self._moves[slot] = self._loop.create_task(self._message(self._staging.slot(slot, nbytes), self._tag))

    async def _message(self, view: np.ndarray[tuple[int], np.dtype[np.uint8]], tag: int) -> None:
        if self._receives:
            await self._library.recv(view, tag=tag)
        else:
            await self._endpoint.send(view, tag=tag, force_tag=True)

    def free(self, slot: int) -> None:
        """Nothing: that a message has gone is known here."""

    def turn(self) -> list[int]:
        """One turn of the loop."""
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        moved = [slot for slot, task in self._moves.items() if task.done()]
        for slot in moved:
            self._moves.pop(slot).result()
        if self._endpoint is not None and self._moves and self._endpoint.closed:
            # A send on an endpoint that is lost may return as if it had been through.
            raise ChannelLost("the endpoint is closed")
        return moved

    @property
    def busy(self) -> bool:
        """Whether a message is on its way."""
        return bool(self._moves)

    def close(self) -> None:
        """Close the endpoint and the library, which takes its shared memory with it."""
        for task in self._moves.values():
            task.cancel()
        self._moves.clear()
        with suppress(Exception):
            if self._endpoint is not None:
                self._endpoint.abort()
            self._endpoint = None
            self._library.reset()


def _load_wheel() -> None:
    # ucxx loads UCX of the wheel only where RAPIDS' memory manager is here too, which it does not need on a CPU.
    with suppress(ModuleNotFoundError):
        importlib.import_module("libucx").load_library()


def _version_of(module: str) -> str:
    return metadata.version(metadata.packages_distributions()[module][0])


MOVERS: dict[str, type[NixlMover | UcxxMover]] = {"nixl": NixlMover, "ucxx": UcxxMover}
