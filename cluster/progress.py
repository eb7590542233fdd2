"""News of a cluster that comes up or goes down."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of news.

    Attributes:
        actor: name of an actor, or "model", "ray", "cluster".
        stage: what it is at.
        fraction: done of that stage, in [0, 1].
        detail: what else is to be said of it.
    """

    actor: str
    stage: str
    fraction: float = 0.0
    detail: str = ""


Progress = Callable[[Step], None]


def silent(_step: Step) -> None:
    """The progress callback that says nothing."""
