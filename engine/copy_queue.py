"""The order between the engine's steps and the copies out of and into its pool, and host memory that a GPU reaches.

Steps are queued on a device by one thread, copies by others. A copy must see what the steps before it have stored, and
whoever is told that it is done must find it done. On the CPU all of that is so already.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from protocol.errors import EngineFailure

logger = logging.getLogger(__name__)


class CopyQueue(ABC):
    """See the module. Any thread may call any method."""

    @abstractmethod
    def mark(self) -> None:
        """All of a step that touches the pool has been queued by the calling thread."""

    @abstractmethod
    def wait_for_steps(self) -> None:
        """Return when every marked step has stored what it stores.

        Raises:
            EngineFailure: the device has failed.
        """

    @abstractmethod
    def ordered(self) -> AbstractContextManager[None]:
        """Copies within it come after every marked step, and are done when it has ended.

        Raises:
            EngineFailure: the device has failed, or has no memory left.
        """

    @abstractmethod
    def pin(self, memory: memoryview) -> bool:
        """Lock host memory, so that the device copies from and to it by itself; whether it is locked now."""

    @abstractmethod
    def unpin(self, memory: memoryview) -> None:
        """Let go of what was pinned; no copy may be under way."""


class HostQueue(CopyQueue):
    """Of a pool in host memory: what is called has happened when the call returns."""

    def mark(self) -> None:
        """See :meth:`CopyQueue.mark`."""

    def wait_for_steps(self) -> None:
        """See :meth:`CopyQueue.wait_for_steps`."""

    def ordered(self) -> AbstractContextManager[None]:
        """See :meth:`CopyQueue.ordered`."""
        return nullcontext()

    def pin(self, memory: memoryview) -> bool:
        """See :meth:`CopyQueue.pin`: there is nothing that would reach it."""
        return False

    def unpin(self, memory: memoryview) -> None:
        """See :meth:`CopyQueue.unpin`."""


class CudaQueue(CopyQueue):
    """Of a pool on a CUDA device: copies go by a stream of their own, beside the steps that are still to come.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._step = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """See :meth:`CopyQueue.mark`."""
        step = torch.cuda.Event()  # type: ignore[no-untyped-call]
        step.record(torch.cuda.current_stream(self._device))
        # Only now, in one store: who waits gets an event that has been recorded, this one or the one before.
        self._step = step

    def wait_for_steps(self) -> None:
        """See :meth:`CopyQueue.wait_for_steps`."""
        try:
            self._step.synchronize()
        except RuntimeError as error:
            raise EngineFailure(f"a step on {self._device} failed: {error}") from error

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """See :meth:`CopyQueue.ordered`."""
        try:
            self._stream.wait_event(self._step)
            with torch.cuda.stream(self._stream):
                try:
                    yield
                finally:
                    # What was queued before an error touches the pool, too. One event, not the stream: others queue.
                    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    done.record(self._stream)
                    done.synchronize()
        except RuntimeError as error:
            raise EngineFailure(f"a copy of KV blocks on {self._device} failed: {error}") from error

    def pin(self, memory: memoryview) -> bool:
        """See :meth:`CopyQueue.pin`."""
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        try:
            with torch.cuda.device(self._device):
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, 0))
        except RuntimeError as error:
            logger.warning("KV goes by host memory that is not pinned, which is slower: %s", error)
            return False
        return True

    def unpin(self, memory: memoryview) -> None:
        """See :meth:`CopyQueue.unpin`."""
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        try:
            with torch.cuda.device(self._device):
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                torch.cuda.check_error(runtime.cudaHostUnregister(address))
        except RuntimeError as error:
            logger.warning("host memory stays pinned: %s", error)


def copy_queue(device: torch.device) -> CopyQueue:
    """The queue for a pool on ``device``."""
    return CudaQueue(device) if device.type == "cuda" else HostQueue()
