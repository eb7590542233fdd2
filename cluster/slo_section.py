"""The part of a cluster's file that says which classes of requests there are, and what they are promised."""

from __future__ import annotations

from typing import Any

import msgspec


class SLOClassSection(msgspec.Struct, frozen=True, kw_only=True):
    """One class of requests; what is None keeps the default of router.slo.classes.SLOClass. Times in seconds.

    Attributes:
        ttft: within which a first token comes; a request that is not predicted to get it is refused.
        tpot: of each further token; decode workers get no more sequences than it allows.
        deadline: time limit of requests that bring none.
        weight: share of the tokens while other classes wait too, beside theirs.
        priority: of requests that bring none; lower is earlier.
        max_queue: requests that wait in the router at most.
    """

    ttft: float | None = None
    tpot: float | None = None
    deadline: float | None = None
    weight: float | None = None
    priority: int | None = None
    max_queue: int | None = None

    def given(self) -> dict[str, Any]:
        """The settings that are not None."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class SLOSection(msgspec.Struct, frozen=True, kw_only=True):
    """Classes of requests; without any, requests go to workers when they come.

    Attributes:
        classes: by name; a class called "default", which is that of requests that name none, promises nothing unless it
            is here.
        default: name of the class of requests that name none, in place of "default".
        backlog: seconds of prompts that a prefill worker is sent ahead; the others wait in the router. None keeps the
            default of router.slo.classes.SLOConfig.
    """

    classes: dict[str, SLOClassSection] = {}
    default: str | None = None
    backlog: float | None = None

    def given(self) -> dict[str, Any]:
        """The settings that are not None, the classes left out."""
        given = {"default": self.default, "backlog": self.backlog}
        return {name: value for name, value in given.items() if value is not None}
