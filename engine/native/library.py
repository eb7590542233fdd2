"""The built kernels, loaded with ctypes: a call with raw pointers costs a microsecond, a dispatcher's several.

Life cycle: :func:`load` once per process, from then on the same answer. Callers check shapes and types; the kernels
check nothing.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import platformdirs
import torch

from engine.native.build import build
from engine.native.weight_memory import WeightMemory

SWITCH = "KVFERRY_NATIVE"
"""Environment variable; ``0`` leaves everything to torch."""
_POINTER, _INT, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "kvf_linear_kind": (),
    "kvf_linear_pack": (*(_POINTER,) * 2, *(_SIZE,) * 3),
    "kvf_linear": (_INT, *(_POINTER,) * 4, *(_SIZE,) * 3, _INT),
    "kvf_gated_linear": (_INT, *(_POINTER,) * 4, *(_SIZE,) * 3, _INT),
    "kvf_add_rms_norm": (_INT, *(_POINTER,) * 4, *(_SIZE,) * 2, _FLOAT, _INT),
    "kvf_silu_and_mul": (_INT, *(_POINTER,) * 2, *(_SIZE,) * 2, _INT),
    "kvf_rope_store": (*(_INT,) * 2, *(_POINTER,) * 6, *(_SIZE,) * 5, _POINTER, *(_FLOAT,) * 2, _INT),
    "kvf_paged_decode": (*(_INT,) * 3, *(_POINTER,) * 7, *(_SIZE,) * 7, _POINTER, _FLOAT, _SIZE, *(_FLOAT,) * 2, _INT),
    "kvf_prompt_attention": (*(_INT,) * 2, *(_POINTER,) * 6, *(_SIZE,) * 7, _POINTER, *(_FLOAT,) * 2, _INT),
    "kvf_tape_new": (),
    "kvf_tape_free": (_POINTER,),
    "kvf_tape_record": (_POINTER,),
    "kvf_tape_length": (_POINTER,),
    "kvf_tape_run": (_POINTER, *(_SIZE,) * 2),
}
_RESULTS = {"kvf_linear_kind": _INT, "kvf_tape_new": _POINTER, "kvf_tape_length": _SIZE}
DTYPES = (torch.float32, torch.bfloat16)
"""Element types that the kernels compute in."""
CACHE_DTYPES = (None, torch.float8_e4m3fn, torch.float8_e5m2)
"""Element types that a cache may have besides the one that is computed in, by the number that the kernels know."""


class Kernels:
    """The functions of the library; see the sources for what each one does.

    Attributes:
        linear_kind: the CPU's dot-product units for bfloat16: 0 none, 1 AVX512-BF16, 2 AMX.
        weight_memory: where packed weights lie.
        linear_pack, linear, gated_linear, add_rms_norm, silu_and_mul, rope_store, paged_decode, prompt_attention,
            tape_new, tape_free, tape_record, tape_length, tape_run: as in the sources, without their prefix.

    Raises:
        OSError: the file is no library that this machine can load.
        AttributeError: it lacks a function.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = _RESULTS.get(name)
        self.linear_pack = library.kvf_linear_pack
        self.linear = library.kvf_linear
        self.gated_linear = library.kvf_gated_linear
        self.add_rms_norm = library.kvf_add_rms_norm
        self.silu_and_mul = library.kvf_silu_and_mul
        self.rope_store = library.kvf_rope_store
        self.paged_decode = library.kvf_paged_decode
        self.prompt_attention = library.kvf_prompt_attention
        self.tape_new = library.kvf_tape_new
        self.tape_free = library.kvf_tape_free
        self.tape_record = library.kvf_tape_record
        self.tape_length = library.kvf_tape_length
        self.tape_run = library.kvf_tape_run
        self.linear_kind: int = library.kvf_linear_kind()
        self.weight_memory = WeightMemory()


@cache
def load() -> Kernels | None:
    """The kernels; None where they are switched off or cannot be built."""
    if os.environ.get(SWITCH) == "0":
        return None
    path = build(Path(platformdirs.user_cache_dir("kvferry")) / "native")
    try:
        return None if path is None else Kernels(path)
    except (OSError, AttributeError):
        return None


def kernels_for(dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The kernels, where they serve tensors of ``dtype`` on ``device``."""
    return load() if device.type == "cpu" and dtype in DTYPES else None
