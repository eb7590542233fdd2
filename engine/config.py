"""Settings of one engine: which model, in which precision, where, and how large a pool."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from engine.graph_batches import MOST
from engine.pool_memory import PoolMemory
from protocol.errors import ConfigError
from protocol.layout import FLOAT8, FloatDtype, Order

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_LIMIT = 1 << 31
DEFAULT_BLOCKS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; never changed after construction.

    Attributes:
        model: path of a Hugging Face model directory.
        dtype: of weights, activations and KV cache; ``auto`` is bfloat16 where the device computes in it, else float32.
        kv_cache_dtype: of the KV cache, if not ``auto``: half the bytes of bfloat16, and lossy. Its scales are the
            checkpoint's, or 1.
        device: ``auto`` is the first CUDA device, or the CPU where there is none.
        block_size: tokens per block.
        order: inner order of a block.
        num_blocks: blocks of the pool, the reserved block 0 included.
        pool_memory: memory of the pool in place of a number of blocks: "8GiB", or "60%" of what the device has free
            once the weights are loaded.
        max_model_len: prompt plus output tokens of one sequence at most; None is what model and pool allow.
        max_batch_tokens: prompt tokens that one step computes at most.
        max_sequences: sequences in one step at most.
        attention: a registered attention backend; ``auto`` fits the device and what can be built on it.
        threads: CPU threads of the forward pass; None leaves torch's own choice.
        prefix_cache: whether full blocks are kept for later requests with the same prefix.
        cuda_graphs: ``auto`` captures steps of decodes, on a CUDA device or a tape of a CPU, where that pays; ``off``
            launches them kernel by kernel.
        cuda_graph_batches: sizes of batch that are captured, ascending; a step is padded to the next of them. None
            takes powers of two and growing steps up to ``max_sequences``.

    Raises:
        ConfigError: a value is outside its range; names the field and the value.
    """

    model: str
    dtype: Literal["auto"] | FloatDtype = "auto"
    kv_cache_dtype: Literal["auto", "float8_e4m3", "float8_e5m2"] = "auto"
    device: str = "auto"
    block_size: int = 16
    order: Order = "NHD"
    num_blocks: int = DEFAULT_BLOCKS
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 64
    attention: str = "auto"
    threads: int | None = None
    prefix_cache: bool = True
    cuda_graphs: Literal["auto", "off"] = "auto"
    cuda_graph_batches: tuple[int, ...] | None = None
    pool_memory: str | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError(f"model must be a path, got {self.model!r}", field="model")
        self._check_choice("dtype", ("auto", *sorted(get_args(FloatDtype))))
        self._check_choice("kv_cache_dtype", ("auto", *FLOAT8))
        self._check_choice("order", ("HND", "NHD"))
        self._check_choice("cuda_graphs", ("auto", "off"))
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}", field="device")
        if not self.attention:
            raise ConfigError(f"attention must be a name, got {self.attention!r}", field="attention")
        for name, least in (("block_size", 1), ("num_blocks", 2), ("max_batch_tokens", 1), ("max_sequences", 1)):
            self._check_count(name, least)
        for name in ("max_model_len", "threads"):
            if getattr(self, name) is not None:
                self._check_count(name, 1)
        self._check_batches()
        if self.pool_memory is None:
            self.longest(self.num_blocks)
            return
        PoolMemory.parse(self.pool_memory)
        if self.num_blocks != DEFAULT_BLOCKS:
            raise ConfigError(
                f"num_blocks {self.num_blocks} and pool_memory {self.pool_memory!r} say the same thing: give one",
                field="pool_memory",
            )

    def longest(self, num_blocks: int) -> int:
        """Tokens of one sequence that a pool of so many blocks holds.

        Raises:
            ConfigError: fewer than ``max_model_len``.
        """
        tokens = (num_blocks - 1) * self.block_size
        if self.max_model_len is not None and self.max_model_len > tokens:
            said = "" if self.pool_memory is None else f" (pool_memory {self.pool_memory!r})"
            raise ConfigError(
                f"max_model_len {self.max_model_len} does not fit num_blocks {num_blocks}{said}: "
                f"{num_blocks - 1} usable blocks of {self.block_size} hold {tokens} tokens",
                field="max_model_len",
            )
        return tokens

    def _check_batches(self) -> None:
        sizes = self.cuda_graph_batches
        if sizes is None:
            return
        whole = bool(sizes) and all(type(size) is int and 1 <= size <= MOST for size in sizes)
        if not whole or sorted(set(sizes)) != list(sizes):
            raise ConfigError(
                f"cuda_graph_batches must be ascending numbers in [1, {MOST}], got {sizes!r}",
                field="cuda_graph_batches",
            )

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}", field=name)

    def _check_count(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or not least <= value < _LIMIT:
            raise ConfigError(f"{name} must be a whole number, {least} or more, got {value!r}", field=name)
