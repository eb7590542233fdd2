"""Steps recorded on a CPU: the native kernels' calls on a tape, and between them what torch computed.

A step of a small batch is some hundred calls of a few microseconds each, and as many tensors are made for them in
Python. On a tape the calls are made one after the other without Python; the tensors between them lie where they lay.

Life cycle of a recording: made by :meth:`TapeRecorder.record`, replayed as often as wanted, freed with its last
reference. The memory of what lives within a step serves all recordings of a recorder, which run one after the other;
it is freed with the last of them, the recorder and the tensors that lie there.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.native.library import Kernels
from engine.recorder import Recorder

_aten = torch.ops.aten
_EMPTY = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
"""Operations that give memory and compute nothing."""
_ALIGNMENT = 64
_NO_OPTIONS: MappingProxyType[str, Any] = MappingProxyType({})


class TapeRecorder(Recorder):
    """See :class:`~engine.recorder.Recorder`, and the module.

    Args:
        kernels: whose calls are kept.
    """

    most = 32
    every = 12
    device = torch.device("cpu")

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._scratch = Scratch()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See :meth:`Recorder.record`."""
        kernels = self._kernels
        tape = kernels.tape_new()
        recording = Recording(kernels, tape, self._scratch)
        kernels.tape_record(tape)
        try:
            with Listener(recording):
                run()
        finally:
            kernels.tape_record(None)
        recording.end()
        return recording.replay

    def upload(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """See :meth:`Recorder.upload`; copied at once."""
        for there, here in pairs:
            there.copy_(here)

    def wait_for_uploads(self) -> None:
        """See :meth:`Recorder.wait_for_uploads`; there is nothing to wait for."""


class Recording:
    """A tape, cut where torch computed something.

    Args:
        kernels: that made the tape.
        tape: taken over; what its addresses belong to, but for ``scratch``, is the caller's to keep.
        scratch: where tensors made within the step lie.
    """

    def __init__(self, kernels: Kernels, tape: int, scratch: Scratch) -> None:
        self.scratch = scratch
        self._kernels = kernels
        self._tape = tape
        self._done = 0
        self._parts: list[tuple[int, int, Callable[[], object] | None]] = []
        weakref.finalize(self, kernels.tape_free, tape)

    def add(self, work: Callable[[], object]) -> None:
        """``work`` comes after the calls that are on the tape by now."""
        now = self._kernels.tape_length(self._tape)
        self._parts.append((self._done, now, work))
        self._done = now

    def end(self) -> None:
        """What is on the tape by now is all."""
        self._parts.append((self._done, self._kernels.tape_length(self._tape), None))

    def replay(self) -> None:
        """Do it all again."""
        run = self._kernels.tape_run
        for first, last, work in self._parts:
            if first < last:
                run(self._tape, first, last)
            if work is not None:
                work()


class Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds what torch computes to a recording, and has memory taken from a place that stays."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is compiled by torch; to be kept from it by torch means to load its compiler, over a second.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for each operation."""
        options = kwargs or _NO_OPTIONS
        found = func(*args, **options)
        if func in _EMPTY:
            return self._recording.scratch.like(found)
        if _writes(func):
            self._recording.add(lambda: func(*args, **options))
        elif not _places(found) <= _places((args, dict(options))):  # a view has nothing of its own
            # What follows has its address: the result of each replay goes there.
            self._recording.add(lambda: _overwrite(found, func(*args, **options)))
        return found


class Scratch:
    """Memory of a step's tensors, whose addresses stay valid: what a tensor leaves the next of its size takes."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def like(self, model: torch.Tensor) -> torch.Tensor:
        """Uninitialised, of the shape and type of ``model``, contiguous, in memory of its own while it lives."""
        assert model.is_contiguous(), "nothing between the kernels is strided"
        if not model.nbytes:
            return model
        size = -(-model.nbytes // _ALIGNMENT) * _ALIGNMENT
        free = self._free[size]
        if not free:
            whole = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
            self._memory.append(whole)
            free.append(whole.data_ptr() + -whole.data_ptr() % _ALIGNMENT)
        address = free.pop()
        held = (ctypes.c_ubyte * size).from_address(address)
        # It ends with the last tensor that looks at this memory, a view or not, and until then keeps all of it.
        weakref.finalize(held, self._leave, size, address).atexit = False
        flat = torch.frombuffer(held, dtype=model.dtype, count=model.numel())
        return flat.view(model.shape)

    def _leave(self, size: int, address: int) -> None:
        self._free[size].append(address)


@cache
def _writes(func: Any) -> bool:
    """Whether an operation writes to what it is given."""
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)


def _places(values: Any) -> set[int]:
    """Where the memory of all tensors in ``values`` begins. No schema tells: ``reshape`` may copy, or may not."""
    return {value.untyped_storage().data_ptr() for value in tree_leaves(values) if isinstance(value, torch.Tensor)}


def _overwrite(there: Any, here: Any) -> None:
    if isinstance(there, torch.Tensor):
        there.copy_(here)
    else:
        for target, source in zip(there, here, strict=True):
            _overwrite(target, source)
