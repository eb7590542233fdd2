"""Free block ids kept as runs of adjacent ids, so that an allocation is one span of memory wherever it can be.

Runs are filed by the power of two of their length (segregated fit, as in TLSF, Masmano et al. 2004) and found by either
end, so adding a block, and taking a run, costs the same however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import InvariantViolation

_PROBES = 8
"""Runs of about the right length that are looked at before a longer one is split."""


class FreeRuns:
    """A set of ids that gives them out in as few runs as it can."""

    def __init__(self, first: int, stop: int) -> None:
        """All ids in ``[first, stop)`` are free."""
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._shelves: list[dict[int, None]] = [{} for _ in range(stop.bit_length() + 1)]
        self._size = 0
        if stop > first:
            self._file(first, stop)

    def __len__(self) -> int:
        return self._size

    def runs(self) -> list[tuple[int, int]]:
        """Every run as ``(first, stop)``, in order."""
        return sorted(self._stop_of.items())

    def add(self, blocks: Sequence[int]) -> None:
        """``blocks``, at least one and all different, are free now; they grow the runs beside them."""
        ordered = sorted(blocks)
        start = stop = ordered[0]
        for block in ordered:
            if block != stop:
                self._join(start, stop)
                start = block
            stop = block + 1
        self._join(start, stop)

    def _join(self, start: int, stop: int) -> None:
        if start in self._start_of:
            start = self._start_of[start]
            self._unfile(start)
        if stop in self._stop_of:
            after = stop
            stop = self._stop_of[after]
            self._unfile(after)
        self._file(start, stop)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Remove ``count`` ids, at most as many as there are.

        Args:
            count: how many.
            after: the id that the caller would like to go on from.
        """
        assert count <= self._size, f"{count} blocks wanted, {self._size} free"
        taken: list[int] = []
        if count and after is not None and after + 1 in self._stop_of:
            taken += self._cut(after + 1, count)
        while len(taken) < count:
            taken += self._cut(self._fit(count - len(taken)), count - len(taken))
        return taken

    def check_integrity(self) -> None:
        """Check that runs are apart, filed once, and add up.

        Raises:
            InvariantViolation: names the run.
        """
        size, end = 0, -1
        for start, stop in self.runs():
            if not end < start < stop or self._start_of.get(stop) != start or start not in self._shelf(stop - start):
                raise InvariantViolation(f"free run [{start}, {stop}) touches another or is misfiled")
            size, end = size + stop - start, stop
        if size != self._size or sum(map(len, self._shelves)) != len(self._stop_of):
            raise InvariantViolation(f"free runs hold {size} blocks, {self._size} were counted")

    def _shelf(self, length: int) -> dict[int, None]:
        return self._shelves[length.bit_length()]

    def _file(self, start: int, stop: int) -> None:
        self._stop_of[start] = stop
        self._start_of[stop] = start
        self._shelf(stop - start)[start] = None
        self._size += stop - start

    def _unfile(self, start: int) -> int:
        stop = self._stop_of.pop(start)
        del self._start_of[stop]
        del self._shelf(stop - start)[start]
        self._size -= stop - start
        return stop

    def _fit(self, count: int) -> int:
        # The tightest run keeps long ones whole for whoever needs them; with none long enough, the longest shelf.
        shelf = count.bit_length()
        if shelf < len(self._shelves):
            for _, start in zip(range(_PROBES), self._shelves[shelf], strict=False):
                if self._stop_of[start] - start >= count:
                    return start
        for longer in self._shelves[shelf + 1 :]:
            if longer:
                return next(iter(longer))
        for shorter in reversed(self._shelves[: shelf + 1]):
            if shorter:
                return next(iter(shorter))
        raise InvariantViolation(f"{self._size} blocks are free, but no run is filed")

    def _cut(self, start: int, count: int) -> list[int]:
        stop = self._unfile(start)
        end = min(stop, start + count)
        if end < stop:
            self._file(end, stop)
        return list(range(start, end))
