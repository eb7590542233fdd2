"""Who wants to hear how far a running step is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocol.errors import InvariantViolation


@dataclass(frozen=True, slots=True)
class LayerWatch:
    """A wish to be called at every so many layers of one step, and after the last.

    Attributes:
        every: layers from one call to the next, at least 1.
        tell: called with the number of layers that are through.

    Raises:
        InvariantViolation: ``every`` is less than 1.
    """

    every: int
    tell: Callable[[int], object]

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InvariantViolation(f"every must be at least 1, got {self.every}", field="every")
