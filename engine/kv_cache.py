"""The memory of a paged KV cache: one allocation, block-major.

Life cycle: allocated, zeroed and page-touched at construction, so that a transport may register it; the same address
until it is dropped. Who may touch which block is the pool's business, not this class's.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import torch

from engine.float8 import Scales, as_bytes
from engine.shared_memory import allocate, take_large_pages
from protocol.errors import ConfigError, EngineFailure
from protocol.layout import CacheDtype, KVLayout

TORCH_DTYPES: dict[CacheDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
"""Element types by the names that a layout uses."""


class KVCache:
    """K and V of every layer, in blocks.

    Attributes:
        layout: geometry.
        num_blocks: blocks, the reserved block 0 included.
        tensor: ``[num_blocks, num_layers, 2, *layout.inner_shape()]``.
        descriptor: of the pool's memory, which is a sealed memfd of just its size; None where it cannot be shared: on a
            GPU, and on systems without memfd. Open as long as this object lives.

    Raises:
        ConfigError: ``num_blocks`` is less than 2.
        EngineFailure: the device has not enough memory.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks must be at least 2, got {num_blocks}", field="num_blocks")
        self.layout = layout
        self.num_blocks = num_blocks
        self.descriptor: int | None = None
        shape, dtype = layout.pool_shape(num_blocks), TORCH_DTYPES[layout.dtype]
        try:
            if torch.device(device).type == "cpu" and hasattr(os, "memfd_create"):
                memory, self.descriptor = allocate(layout.pool_bytes(num_blocks))
                weakref.finalize(self, os.close, self.descriptor)
                take_large_pages(memory)
                self.tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
            else:
                self.tensor = torch.empty(shape, dtype=dtype, device=device)
            # Not torch.zeros: that leaves the pages to be faulted in later, one by one, by whoever writes first.
            self.tensor.zero_()
        except (RuntimeError, OSError, OverflowError) as error:
            raise EngineFailure(
                f"cannot allocate num_blocks {num_blocks}, {layout.pool_bytes(num_blocks)} bytes on {device}: {error}"
            ) from error

        self._layers = [(self.tensor[:, index, 0], self.tensor[:, index, 1]) for index in range(layout.num_layers)]
        self._scales = [Scales(*layout.scales_of(index)) for index in range(layout.num_layers)]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, ``(source, target)`` each; every source is read before any target is written."""
        sources, targets = torch.tensor(pairs, device=self.tensor.device).unbind(1)
        pool = as_bytes(self.tensor)
        pool.index_copy_(0, targets, pool.index_select(0, sources))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer: strided views ``[num_blocks, *layout.inner_shape()]``."""
        return self._layers[index]

    def scales(self, index: int) -> Scales:
        """Of one layer."""
        return self._scales[index]

    @property
    def in_host_memory(self) -> bool:
        """Whether :meth:`memory` can be had."""
        return self.tensor.device.type == "cpu"

    def memory(self) -> memoryview:
        """The whole pool as writable bytes; valid as long as the view lives.

        Raises:
            EngineFailure: the pool is not in host memory.
        """
        if not self.in_host_memory:
            raise EngineFailure(f"the KV cache is on {self.tensor.device}, not in host memory")
        return self.tensor.view(torch.uint8).view(-1).numpy().data

    @property
    def data_ptr(self) -> int:
        """Address of the first byte."""
        return self.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.tensor.nbytes
