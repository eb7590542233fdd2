"""One transition table per state machine; an illegal move raises with the key's story.

Life cycle of a :class:`Tracker`: made in the table's initial state, moved by :meth:`Tracker.move`, dead once it
reaches a state that the table has no way out of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from protocol.errors import IllegalTransition

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)

STORY_LENGTH = 32
"""Moves that a tracker remembers for an error message."""


class TransitionTable(Generic[S, E]):
    """Which event leads from which state to which; everything else is illegal.

    Attributes:
        name: of the machine, for messages.
        initial: the state a key begins in.
        moves: ``{(state, event): next state}``.
    """

    def __init__(self, name: str, initial: S, moves: Mapping[tuple[S, E], S]) -> None:
        self.name = name
        self.initial = initial
        self.moves = dict(moves)
        self._leaving = {state for state, _ in self.moves}

    def allows(self, state: S, event: E) -> bool:
        """Whether ``event`` is legal in ``state``."""
        return (state, event) in self.moves

    def is_final(self, state: S) -> bool:
        """Whether nothing leads out of ``state``."""
        return state not in self._leaving

    def start(self, key: str) -> Tracker[S, E]:
        """A tracker for ``key`` in the initial state."""
        return Tracker(self, key)


class Tracker(Generic[S, E]):
    """The current state of one key, and how it got there."""

    __slots__ = ("_story", "key", "state", "table")

    def __init__(self, table: TransitionTable[S, E], key: str) -> None:
        self.table = table
        self.key = key
        self.state: S = table.initial
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)

    @property
    def final(self) -> bool:
        """Whether the key has ended."""
        return self.table.is_final(self.state)

    def allows(self, event: E) -> bool:
        """Whether ``event`` is legal now."""
        return self.table.allows(self.state, event)

    def move(self, event: E) -> S:
        """Apply ``event`` and return the new state.

        Raises:
            IllegalTransition: the table has no such move.
        """
        target = self.table.moves.get((self.state, event))
        if target is None:
            story = " ".join((*self._story, self.state.name))
            raise IllegalTransition(f"{self.table.name} {self.key}: {event.name} is illegal in {story}")
        self._story.append(f"{self.state.name} -{event.name}->")
        self.state = target
        return target
