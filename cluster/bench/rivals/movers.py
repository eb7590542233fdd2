"""One process of a rival's transfer, in a ``program``: it needs numpy, the rival and nothing of ours.

Life cycle: started -> met (knows the other process) -> planned -> moves ... -> standard input ends.
"""

from __future__ import annotations

import base64
import importlib
import importlib.metadata
import mmap
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

Blocks = Sequence[int]
Ship = tuple[Blocks, Blocks]
"""``(blocks of this process, blocks of the other)``, one to one."""
MODES = ("READ", "WRITE")
"""By the receiving process, or by the sending one."""
POLLS_PER_LOOK = 256
BATCH = 1024
"""Of one call of Mooncake's, which refuses more."""


class Pool:
    """The memory, as blocks."""

    def __init__(self, blocks: int, block_bytes: int, seed: int) -> None:
        self.blocks = blocks
        self.block_bytes = block_bytes
        self.view = memoryview(mmap.mmap(-1, blocks * block_bytes))
        self.bytes = np.frombuffer(self.view, np.uint8)
        self.base = int(self.bytes.ctypes.data)
        self.bytes[:] = np.resize(
            np.random.default_rng(seed).integers(0, 256, (1 << 20) + 7, np.uint8), self.bytes.size
        )

    def block(self, block: int) -> memoryview:
        """The bytes of one block."""
        return self.view[block * self.block_bytes : (block + 1) * self.block_bytes]

    def checksum(self, blocks: Blocks) -> int:
        """CRC-32 of blocks, in order."""
        crc = 0
        for block in blocks:
            crc = zlib.crc32(self.block(block), crc)
        return crc

    def poison(self, blocks: Blocks) -> None:
        """Overwrite blocks."""
        for block in blocks:
            self.block(block)[:] = b"\xa5" * self.block_bytes


class Engine(Protocol):
    """What a rival does here."""

    version: str

    def card(self) -> dict[str, Any]:
        """What the other process must know."""

    def meet(self, card: dict[str, Any]) -> None:
        """Get to know the other process by its card."""

    def prepare(self, transfers: Sequence[Sequence[Ship]]) -> None:
        """Make ready, outside the measured time, to move these."""

    def move(self, mode: str) -> list[float]:
        """Move all that was prepared, transfers side by side, ships of one in turn; seconds of each transfer."""

    def poll(self) -> bool:
        """Give the library a turn while the other process moves; False where it needs none."""


class Nixl:
    """NIXL with its UCX backend: descriptors of all blocks are prepared once, a request for a transfer names some."""

    def __init__(self, pool: Pool, role: str) -> None:
        name, api = _found(("nixl._api", "nixl_cu12._api", "nixl_cu13._api"))
        self.version = _version(name.split(".")[0].replace("_", "-"))
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = api.nixl_agent(role, config)
        self._pool = pool
        self._agent.register_memory([(pool.base, pool.bytes.nbytes, 0, "")], "DRAM")
        self._transfers: list[list[tuple[Any, Any]]] = []

    def card(self) -> dict[str, Any]:
        """See :meth:`Engine.card`."""
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "base": self._pool.base}

    def meet(self, card: dict[str, Any]) -> None:
        """See :meth:`Engine.meet`."""
        peer = self._agent.add_remote_agent(base64.b64decode(card["metadata"]))
        self._agent.make_connection(peer)
        self._here = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._descriptors(self._pool.base))
        self._there = self._agent.prep_xfer_dlist(peer, self._descriptors(card["base"]))

    def _descriptors(self, base: int) -> Any:
        pool = self._pool
        table = np.zeros((pool.blocks, 3), np.uint64)
        table[:, 0] = base + np.arange(pool.blocks, dtype=np.uint64) * np.uint64(pool.block_bytes)
        table[:, 1] = pool.block_bytes
        return self._agent.get_xfer_descs(table, "DRAM")

    def prepare(self, transfers: Sequence[Sequence[Ship]]) -> None:
        """See :meth:`Engine.prepare`."""
        self._transfers = [
            [(np.array(here, np.int32), np.array(there, np.int32)) for here, there in ships] for ships in transfers
        ]

    def move(self, mode: str) -> list[float]:
        """See :meth:`Engine.move`."""
        started = time.perf_counter()
        seconds = [0.0] * len(self._transfers)
        running = [(index, self._ships(mode, ships)) for index, ships in enumerate(self._transfers)]
        while running:
            for index, ships in tuple(running):
                if next(ships, None) is None:
                    seconds[index] = time.perf_counter() - started
                    running.remove((index, ships))
        return seconds

    def _ships(self, mode: str, ships: Sequence[tuple[Any, Any]]) -> Iterator[bool]:
        for here, there in ships:
            handle = self._agent.make_prepped_xfer(mode, self._here, here, self._there, there)
            state = self._agent.transfer(handle)
            while state == "PROC":
                yield True
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)
            if state != "DONE":
                raise RuntimeError(f"the transfer ended as {state}")

    def poll(self) -> bool:
        """See :meth:`Engine.poll`."""
        self._agent.get_new_notifs()
        return True


class Mooncake:
    """Mooncake's transfer engine: adjacent blocks as one entry, entries in batches, a thread for each transfer."""

    def __init__(self, pool: Pool, role: str) -> None:
        del role
        _, api = _found(("mooncake.engine",))
        self.version = _version("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
        self._engine = api.TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the engine does not start")
        self._pool = pool
        if self._engine.register_memory(pool.base, pool.bytes.nbytes):
            raise RuntimeError("the engine does not take the memory")
        self._transfers: list[list[tuple[list[int], list[int], list[int]]]] = []
        self._threads = ThreadPoolExecutor(1)

    def card(self) -> dict[str, Any]:
        """See :meth:`Engine.card`."""
        return {"name": f"127.0.0.1:{self._engine.get_rpc_port()}", "base": self._pool.base}

    def meet(self, card: dict[str, Any]) -> None:
        """See :meth:`Engine.meet`."""
        self._peer, self._base = card["name"], card["base"]

    def prepare(self, transfers: Sequence[Sequence[Ship]]) -> None:
        """See :meth:`Engine.prepare`."""
        self._transfers = [[batch for ship in ships for batch in self._batches(ship)] for ships in transfers]
        self._threads = ThreadPoolExecutor(len(transfers))

    def _batches(self, ship: Ship) -> Iterator[tuple[list[int], list[int], list[int]]]:
        runs = list(_runs(*ship))
        size = self._pool.block_bytes
        for first in range(0, len(runs), BATCH):
            some = runs[first : first + BATCH]
            yield (
                [self._pool.base + here * size for here, _, _ in some],
                [self._base + there * size for _, there, _ in some],
                [count * size for _, _, count in some],
            )

    def move(self, mode: str) -> list[float]:
        """See :meth:`Engine.move`."""
        call = self._engine.batch_transfer_sync_read if mode == "READ" else self._engine.batch_transfer_sync_write
        started = time.perf_counter()

        def one(batches: Sequence[tuple[list[int], list[int], list[int]]]) -> float:
            for here, there, sizes in batches:
                if call(self._peer, here, there, sizes):
                    raise RuntimeError("the transfer failed")
            return time.perf_counter() - started

        if len(self._transfers) == 1:
            return [one(self._transfers[0])]
        return list(self._threads.map(one, self._transfers))

    def poll(self) -> bool:
        """See :meth:`Engine.poll`."""
        return False


RIVALS: dict[str, Callable[[Pool, str], Engine]] = {"nixl": Nixl, "mooncake": Mooncake}


def _found(names: Sequence[str]) -> tuple[str, Any]:
    for name in names:
        try:
            return name, importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ModuleNotFoundError(f"{names[0].split('.')[0]} is not installed for {sys.executable}")


def _version(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def _runs(here: Blocks, there: Blocks) -> Iterator[tuple[int, int, int]]:
    """``(first here, first there, count)`` of blocks that are neighbours on both sides."""
    first = 0
    for index in range(1, len(here) + 1):
        if (
            index == len(here)
            or here[index] - here[first] != index - first
            or there[index] - there[first] != index - first
        ):
            yield here[first], there[first], index - first
            first = index


class Answerer:
    """Carries out orders."""

    def __init__(self, waiting: Callable[[], bool]) -> None:
        self._waiting = waiting
        self._engine: Engine | None = None
        self._pool: Pool | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """What one order gives."""
        if order["do"] == "start":
            self._pool = Pool(order["blocks"], order["block_bytes"], order["seed"])
            self._engine = RIVALS[order["rival"]](self._pool, order["role"])
            return {"version": self._engine.version, "modes": MODES, "card": self._engine.card()}
        engine, pool = self._engine, self._pool
        assert engine is not None, "started first"
        assert pool is not None, "made with the engine"
        match order["do"]:
            case "meet":
                engine.meet(order["card"])
            case "prepare":
                engine.prepare(order["transfers"])
            case "move":
                return {"seconds": engine.move(order["mode"])}
            case "poison":
                pool.poison(order["blocks"])
            case "checksum":
                return {"crc": pool.checksum(order["blocks"])}
        return {}

    def after(self, order: dict[str, Any]) -> None:
        """What is left to do when the answer has gone out: where it serves, poll until the next order comes."""
        if order["do"] != "serve":
            return
        assert self._engine is not None, "started first"
        while self._engine.poll() and not self._waiting():
            for _ in range(POLLS_PER_LOOK):
                self._engine.poll()
