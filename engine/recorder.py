"""Work that is recorded once and replayed by one call: CUDA's graphs here, a CPU's tapes in a module of their own.

Whoever records sees tensors and calls, and nothing of either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from engine.graph_batches import MOST

WARM_RUNS = 2
"""Runs before a capture: kernels are compiled and libraries take their workspaces, which no capture may do."""


class Recorder(ABC):
    """See the module. One thread.

    Attributes:
        device: that computes.
        most: sequences of the largest batch that is worth it.
        every: sequences up to which a row of padding costs as much as one that is wanted, so that no size is left out.
    """

    device: torch.device
    most: int = MOST
    every: int = 0

    @abstractmethod
    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What repeats the work of ``run``, on the same addresses, in the caller's order of work.

        ``run`` is called by this, at least once: it must depend on nothing but the contents of tensors. It is not kept:
        what it works on is the caller's to keep, for as long as it replays.

        Raises:
            RuntimeError: torch's, where something in it cannot be recorded, or there is no memory.
        """

    @abstractmethod
    def upload(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue copies, ``(on the device, in host memory)``, before what is replayed next."""

    @abstractmethod
    def wait_for_uploads(self) -> None:
        """Return when the host memory of the last uploads is read no more."""


class CudaRecorder(Recorder):
    """CUDA graphs that share one pool of memory, for they run one after the other.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See :meth:`Recorder.record`."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_RUNS):
                run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on copying blocks meanwhile: only what this one calls is held to a capture's rules.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def upload(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """See :meth:`Recorder.upload`."""
        for there, here in pairs:
            there.copy_(here, non_blocking=True)
        self._uploaded.record(torch.cuda.current_stream(self.device))

    def wait_for_uploads(self) -> None:
        """See :meth:`Recorder.wait_for_uploads`."""
        self._uploaded.synchronize()
