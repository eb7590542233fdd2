"""Classes of requests, and what each is promised."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from protocol.errors import ConfigError
from protocol.rules import check
from router.priority import MAX_PRIORITY

DEFAULT = "default"
"""The class of requests that name none, where the configuration names none either."""
MAX_CLASSES = 64
MAX_CLASS_NAME = 64
MAX_WEIGHT = 1e6
CLASS_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_CLASS_NAME}}}")


@dataclass(frozen=True, kw_only=True)
class SLOClass:
    """One class. Times in seconds; 0 promises nothing.

    Attributes:
        name: by which requests and keys name it.
        ttft: within which a first token comes; who is not predicted to get it is refused.
        tpot: of each further token; decode workers get no more sequences than it allows, while such a request is here.
        deadline: time limit of requests that bring none.
        weight: share of the tokens that the class gets while others wait too, beside theirs.
        priority: of requests that bring none.
        max_queue: requests that wait at most.

    Raises:
        ConfigError: a value is outside its range; names the field and the value.
    """

    name: str = DEFAULT
    ttft: float = 0.0
    tpot: float = 0.0
    deadline: float = 0.0
    weight: float = 1.0
    priority: int = 0
    max_queue: int = 1024

    def __post_init__(self) -> None:
        check(self, ("name", CLASS_NAME.fullmatch(self.name) is not None, "1 to 64 of A-Z a-z 0-9 . _ -"))
        for field in ("ttft", "tpot", "deadline"):
            check(self, (field, 0.0 <= getattr(self, field) <= 86400.0, "in [0, 86400]"))
        check(self, ("weight", 0.0 < self.weight <= MAX_WEIGHT, f"over 0 and at most {MAX_WEIGHT:g}"))
        check(self, ("priority", abs(self.priority) <= MAX_PRIORITY, f"in [-{MAX_PRIORITY}, {MAX_PRIORITY}]"))
        check(self, ("max_queue", 1 <= self.max_queue <= 1 << 20, "in [1, 2**20]"))


@dataclass(frozen=True, kw_only=True)
class SLOConfig:
    """All classes of a router; without any, requests go to workers when they come.

    Attributes:
        classes: each with a name of its own.
        default: name of the class of requests that name none; "" is the class called ``default``, which promises
            nothing where it is not among the classes.
        backlog: seconds of prompts that a prefill worker is sent ahead of what it computes; the others wait in the
            router, where it is still open whose turn it will be.

    Raises:
        ConfigError: a value is outside its range; names the field and the value.
    """

    classes: tuple[SLOClass, ...] = ()
    default: str = ""
    backlog: float = 0.2

    def __post_init__(self) -> None:
        if len(self.classes) > MAX_CLASSES:
            raise ConfigError(f"classes must be at most {MAX_CLASSES}, got {len(self.classes)}", field="classes")
        names = [each.name for each in self.classes]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"classes must have names of their own, got {name!r} twice", field="classes")
        if self.default and self.default not in names:
            known = ", ".join(names) or "none"
            raise ConfigError(f"default must be one of the classes ({known}), got {self.default!r}", field="default")
        check(self, ("backlog", 0.0 < self.backlog < math.inf, "over 0 and finite"))

    @property
    def active(self) -> bool:
        """Whether requests wait for their turn at all."""
        return bool(self.classes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of all classes, the default one included."""
        return tuple(self._by_name)

    def of(self, name: str) -> SLOClass:
        """The class of that name; the default one where there is none."""
        return self._by_name.get(name) or self._by_name[self.default or DEFAULT]

    @cached_property
    def _by_name(self) -> dict[str, SLOClass]:
        named = {each.name: each for each in self.classes}
        return named if self.default else {DEFAULT: SLOClass(), **named}
