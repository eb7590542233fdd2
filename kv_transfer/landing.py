"""A receiver whose blocks arrive in another form than the pool's, and are unpacked into it before they are reported.

They land in memory of their own, which has a place for each block of the pool; so who may write what is decided as for
any receiver. A block is unpacked once, when the ship that wrote it has landed, and from then on nobody writes its
place under that ticket. Closing a window waits for what is being unpacked: after it no byte of the pool changes either.

Life cycle: as of a receiver.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from kv_transfer.transport import Landed, OnBroken, OnLanded, Receiver, Window
from protocol.errors import TransferError


class Landing(Receiver):
    """See the module.

    Args:
        receiver: writes the memory that blocks land in.
        unpack: makes the pool's blocks of these ids out of what has landed; blocking.
        discard: forgets what lies in the places of these blocks; blocking.
    """

    def __init__(
        self,
        receiver: Receiver,
        unpack: Callable[[tuple[int, ...]], None],
        discard: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._receiver = receiver
        self._unpack = unpack
        self._discard = discard
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="landing")
        self._blocks: dict[bytes, tuple[int, ...]] = {}
        self._unpacking: defaultdict[bytes, set[asyncio.Task[None]]] = defaultdict(set)
        self._closing: dict[bytes, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def address(self) -> str:
        """Of the receiver."""
        return self._receiver.address

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the receiver."""
        return self._receiver.addresses

    def open(self, window: Window, on_landed: OnLanded, on_broken: OnBroken) -> None:
        """See :meth:`Receiver.open`; the window is of blocks as they land."""

        def landed(report: Landed) -> None:
            task = asyncio.create_task(self._take_in(report, on_landed, on_broken))
            self._unpacking[window.ticket].add(task)

        self._receiver.open(window, landed, on_broken)
        self._blocks[window.ticket] = window.blocks

    async def _take_in(self, report: Landed, on_landed: OnLanded, on_broken: OnBroken) -> None:
        ticket = report.ticket
        try:
            await self._in_thread(self._unpack, report.blocks)
        except Exception as error:
            # Whatever it was, the import must hear of it: it would wait for these blocks for ever.
            on_broken(ticket, TransferError(f"cannot unpack {len(report.blocks)} blocks: {error}"))
        else:
            on_landed(report)

    async def close_window(self, ticket: bytes) -> None:
        """See :meth:`Receiver.close_window`."""
        # Two who close one window wait for the same end, after which the blocks may be in another window.
        if ticket not in self._closing:
            self._closing[ticket] = asyncio.create_task(self._quiesce(ticket))
            self._closing[ticket].add_done_callback(lambda _: self._closing.pop(ticket))
        await asyncio.shield(self._closing[ticket])

    async def _quiesce(self, ticket: bytes) -> None:
        await self._receiver.close_window(ticket)
        if tasks := self._unpacking.pop(ticket, None):
            await asyncio.wait(tasks)
        blocks = self._blocks.pop(ticket, ())
        if blocks and not self._closed:
            await self._in_thread(self._discard, blocks)

    async def close(self) -> None:
        """See :meth:`Receiver.close`."""
        if self._closed:
            return
        self._closed = True
        await self._receiver.close()
        for tasks in list(self._unpacking.values()):
            await asyncio.wait(tasks)
        self._thread.shutdown(wait=True)

    async def _in_thread(self, work: Callable[[tuple[int, ...]], None], blocks: Iterable[int]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work, tuple(blocks))
