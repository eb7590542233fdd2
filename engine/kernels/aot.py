"""Compile the kernels for every supported GPU on a machine that has none, and read what they would use there.

A kernel that spills registers, or wants more shared memory than the chip has, is slow or fails only on the GPU; this
finds it where the code is changed. ``budget.yaml`` holds the limits. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import triton
import yaml
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from engine.kernels import paged_decode, paged_prefill, store_kv, tiles
from engine.kernels.float8 import FORMATS
from engine.kernels.operands import HALVES, HEAD_DIMS, TRITON_TYPE
from protocol.errors import ConfigError, EngineFailure

TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""Architectures that kernels are compiled for: A100, H100 and MI300."""

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_KV_HEADS, _GROUP, _BLOCK_SIZE = 8, 4, 16


@dataclass(frozen=True)
class Variant:
    """One kernel with its types and compile-time arguments fixed.

    Attributes:
        name: kernel, dtype and sizes.
        kernel: the ``@triton.jit`` function.
        types: Triton types of the arguments that are not plain strides (those are 32-bit).
        constants: compile-time arguments.
        options: warps and stages.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, int]
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The kernel's own name, by which the budget is kept."""
        return str(self.kernel.__name__)


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel uses.

    Attributes:
        registers: per thread (on AMD vector and accumulation registers together).
        spill_bytes: per thread in local memory: spilled registers or arrays that found no register.
        shared_bytes: shared memory (LDS) per program.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int

    def over(self, limit: Usage) -> list[str]:
        """One line per figure that is above ``limit``."""
        return [
            f"{name} {getattr(self, name)} is over {getattr(limit, name)}"
            for name in ("registers", "spill_bytes", "shared_bytes")
            if getattr(self, name) > getattr(limit, name)
        ]


def variants(
    arch: str,
    dtypes: Sequence[torch.dtype] = tuple(TRITON_TYPE),
    head_dims: Sequence[int] = HEAD_DIMS,
    cache_dtypes: Sequence[torch.dtype | None] = (None, *FORMATS),
) -> Iterator[Variant]:
    """Every kernel for the given element types and head dimensions, launched as its wrapper launches it on ``arch``.

    Args:
        arch: one of :data:`TARGETS`.
        dtypes: that are computed in.
        head_dims: elements per head.
        cache_dtypes: eight-bit types of the cache, for types that are computed in over one; None is a cache of the type
            that is computed in.

    Raises:
        ConfigError: unknown architecture.
    """
    amd = _target(arch).backend == "hip"
    for dtype in dtypes:
        for head_dim in head_dims:
            for cache_dtype in cache_dtypes:
                if cache_dtype is None or dtype in HALVES:
                    yield from _variants_of(dtype, head_dim, cache_dtype, amd=amd)


def _variants_of(dtype: torch.dtype, head_dim: int, cache_dtype: torch.dtype | None, *, amd: bool) -> Iterator[Variant]:
    element, label = TRITON_TYPE[dtype], f"{TRITON_TYPE[dtype]} D={head_dim}"
    if cache_dtype is None:
        eighth, kept = 0, element
    else:
        eighth, kept = FORMATS[cache_dtype], "u8"
        label = f"{label} over {str(cache_dtype).removeprefix('torch.')}"
    caches = {"k_cache_ptr": f"*{kept}", "v_cache_ptr": f"*{kept}"}
    yield Variant(
        name=f"store_kv {label}",
        kernel=store_kv.store_kv_kernel,
        types=caches
        | {"k_ptr": f"*{element}", "v_ptr": f"*{element}", "slot_ptr": "*i64"}
        | {"k_inverse": "fp32", "v_inverse": "fp32"},
        constants=store_kv.kernel_constants(_KV_HEADS, head_dim, _BLOCK_SIZE, eighth),
        options={"num_warps": store_kv.NUM_WARPS},
    )
    parts = {"part_ptr": "*fp32", "lse_ptr": "*fp32"}
    launch = paged_decode.launch(dtype, head_dim, eighth)
    scalars = {"score_in": "fp32", "score_out": "fp32", "v_scale": "fp32", "window": "i32"}
    for capped in (False, True):
        yield Variant(
            name=f"paged_decode_split {label}{' capped' if capped else ''}",
            kernel=paged_decode.paged_decode_split_kernel,
            types=caches | parts | scalars | {"q_ptr": f"*{element}", "table_ptr": "*i32", "len_ptr": "*i32"},
            constants=paged_decode.split_constants(
                _GROUP, head_dim, _BLOCK_SIZE, launch.block_n, capped=capped, eighth=eighth
            ),
            options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
        )
    tiled = tiles.launch(dtype, head_dim, _GROUP, eighth, amd=amd)
    indices = dict.fromkeys(("table_ptr", "query_start_ptr", "len_ptr", "tile_ptr"), "*i32")
    for capped in (False, True):
        yield Variant(
            name=f"paged_prefill {label}{' capped' if capped else ''}",
            kernel=paged_prefill.paged_prefill_kernel,
            types=caches | scalars | indices | {"q_ptr": f"*{element}", "out_ptr": f"*{element}"},
            constants=tiles.tile_constants(tiled, _GROUP, head_dim, _BLOCK_SIZE, capped=capped, eighth=eighth),
            options={"num_warps": tiled.num_warps, "num_stages": tiles.EDGE_STAGES},
        )
    if eighth:
        return  # the parts that are joined are the same
    yield Variant(
        name=f"paged_decode_reduce {label}",
        kernel=paged_decode.paged_decode_reduce_kernel,
        types=parts | {"out_ptr": f"*{element}"},
        constants=paged_decode.reduce_constants(head_dim, paged_decode.MAX_SPLITS),
        options={"num_warps": paged_decode.REDUCE_WARPS},
    )


def compile_variant(variant: Variant, arch: str) -> Usage:
    """Compile for one of :data:`TARGETS` and read the usage.

    Raises:
        ConfigError: unknown architecture.
        EngineFailure: it does not compile; names the variant.
    """
    target = _target(arch)
    names = list(variant.kernel.arg_names)
    signature = {name: "constexpr" if name in variant.constants else variant.types.get(name, "i32") for name in names}
    # What the JIT finds out for aligned tensors whose rows are whole vectors; base pointers of a pool always are.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (name.startswith("stride_") and not name.startswith("stride_lse"))
    }
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=aligned)
    try:
        compiled = triton.compile(source, target=target, options=dict(variant.options))
    except Exception as error:
        raise EngineFailure(f"{variant.name} does not compile for {arch}: {error}") from error
    return _amd_usage(compiled) if target.backend == "hip" else _nvidia_usage(compiled)


def _target(arch: str) -> GPUTarget:
    if arch not in TARGETS:
        raise ConfigError(f"arch must be one of {list(TARGETS)}, got {arch!r}", field="arch")
    return TARGETS[arch]


def budget() -> dict[str, dict[str, Usage]]:
    """Limits by architecture and kernel name, from ``budget.yaml``."""
    loaded = yaml.safe_load((resources.files("engine.kernels") / "budget.yaml").read_text(encoding="utf-8"))
    return {
        arch: {kernel: Usage(limit["registers"], 0, limit["shared_bytes"]) for kernel, limit in kernels.items()}
        for arch, kernels in loaded.items()
    }


def _nvidia_usage(compiled: CompiledKernel) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        dump = subprocess.run(  # noqa: S603 - the tool is triton's own, the argument ours
            [_CUOBJDUMP, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        )
    # Spills show as STACK; LOCAL stays 0.
    return Usage(_figure(r"REG:(\d+)", dump.stdout), _figure(r"STACK:(\d+)", dump.stdout), compiled.metadata.shared)


def _amd_usage(compiled: CompiledKernel) -> Usage:
    text = compiled.asm["amdgcn"]
    # The wave's unified register file: accumulation registers are part of the vector count on gfx90a and later.
    registers = _figure(r"\.vgpr_count:\s*(\d+)", text)
    spilled = _figure(r"\.private_segment_fixed_size:\s*(\d+)", text)
    lds = max(compiled.metadata.shared, _figure(r"\.group_segment_fixed_size:\s*(\d+)", text))
    return Usage(registers, spilled, lds)


def _figure(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise EngineFailure(f"the compiler's report has no {pattern}: {text[-200:]!r}")
    return int(found[1])
