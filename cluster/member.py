"""One member of a cluster: a name, what runs under it, and where that stands.

Life cycle of a name::

    MISSING -created-> STARTING -came up-> READY
    STARTING, READY -switch-> SWITCHING -came up-> READY      the process stays, in another role and a new incarnation
    STARTING, READY, SWITCHING -died-> MISSING                made again, with a higher incarnation
    STARTING, READY, SWITCHING -drain-> DRAINING -died-> GONE
    MISSING -drain-> GONE
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import msgspec

from protocol.ids import Role
from protocol.transitions import Tracker, TransitionTable

MemberRole = Literal["router"] | Role
NAMES = re.compile(r"(router|prefill|decode)-\d{1,9}")
STEADY_SECONDS = 30.0
"""A life that was ready for so long has not failed at its start."""
MAX_PAUSE_SECONDS = 30.0


class MemberState(Enum):
    """Where a member stands."""

    MISSING = "missing"
    STARTING = "starting"
    READY = "ready"
    SWITCHING = "switching"
    DRAINING = "draining"
    GONE = "gone"


class MemberEvent(Enum):
    """What moves it."""

    CREATED = "created"
    CAME_UP = "came up"
    SWITCH = "switch"
    DIED = "died"
    DRAIN = "drain"


MEMBERS = TransitionTable(
    "member",
    MemberState.MISSING,
    {
        (MemberState.MISSING, MemberEvent.CREATED): MemberState.STARTING,
        (MemberState.MISSING, MemberEvent.DRAIN): MemberState.GONE,
        (MemberState.STARTING, MemberEvent.CAME_UP): MemberState.READY,
        (MemberState.STARTING, MemberEvent.DIED): MemberState.MISSING,
        (MemberState.STARTING, MemberEvent.DRAIN): MemberState.DRAINING,
        (MemberState.STARTING, MemberEvent.SWITCH): MemberState.SWITCHING,
        (MemberState.READY, MemberEvent.SWITCH): MemberState.SWITCHING,
        (MemberState.SWITCHING, MemberEvent.CAME_UP): MemberState.READY,
        (MemberState.SWITCHING, MemberEvent.DIED): MemberState.MISSING,
        (MemberState.SWITCHING, MemberEvent.DRAIN): MemberState.DRAINING,
        (MemberState.READY, MemberEvent.DIED): MemberState.MISSING,
        (MemberState.READY, MemberEvent.DRAIN): MemberState.DRAINING,
        (MemberState.DRAINING, MemberEvent.DIED): MemberState.GONE,
    },
)
"""The one transition table of a member."""


class Sight(Enum):
    """What is seen of a member's process; FORMER is the one before its present life, which shall become it."""

    ABSENT = "absent"
    PLACING = "placing"
    FORMER = "former"
    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"
    FAILED = "failed"


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a member beyond the supervisor's life.

    Attributes:
        name: of the actor.
        role: what it runs, or shall run once it has drained; the name tells only what it began as.
        revision: of the configuration that its present life was made with.
        incarnation: of its present life, or its last one.
        lives: processes that were made for it.
        leaving: whether it shall not come back.
        drain_timeout: seconds that it gets to finish what it has, if it is leaving or takes another role.
        fixed: whether a restart leaves its present life alone: a router that cannot share its port.
    """

    name: str
    role: MemberRole
    revision: int = 1
    incarnation: int = 1
    lives: int = 1
    leaving: bool = False
    drain_timeout: float = 0.0
    fixed: bool = False

    @property
    def index(self) -> int:
        """The number in its name."""
        return int(self.name.rpartition("-")[2])


@dataclass
class Member:
    """One name of the wanted set, or one that leaves it.

    Attributes:
        record: what is kept of it.
        seen: what was seen of its process last.
        error: why it failed last, or "".
        due: when it shall be made again, if it is missing.
        since: when it came to the state that it is in.
        failures: lives in a row that ended before they were steady.
    """

    record: MemberRecord
    tracker: Tracker[MemberState, MemberEvent] = field(init=False)
    seen: Sight = Sight.ABSENT
    error: str = ""
    due: float = 0.0
    since: float = 0.0
    failures: int = 0

    def __post_init__(self) -> None:
        self.tracker = MEMBERS.start(self.record.name)

    @property
    def state(self) -> MemberState:
        """Where it stands."""
        return self.tracker.state

    @property
    def serves(self) -> bool:
        """Whether it takes work, as far as anybody can see."""
        return self.state is MemberState.READY and self.seen is Sight.READY

    def move(self, event: MemberEvent, now: float) -> None:
        """Something happened to it."""
        self.tracker.move(event)
        self.since = now

    def observe(self, sight: Sight, error: str, now: float) -> bool:
        """Take in what was seen; whether its process shall be ended, because it failed."""
        self.seen = sight
        if error:
            self.error = error
        if sight is Sight.ABSENT:
            if self.tracker.allows(MemberEvent.DIED):
                self._died(now)
            return False
        if self.state is MemberState.MISSING:
            self.move(MemberEvent.CREATED, now)
        if sight is Sight.FORMER and self.tracker.allows(MemberEvent.SWITCH):
            self.move(MemberEvent.SWITCH, now)
        if sight is Sight.READY and self.tracker.allows(MemberEvent.CAME_UP):
            self.move(MemberEvent.CAME_UP, now)
            self.error = ""
        return sight is Sight.FAILED

    def _died(self, now: float) -> None:
        steady = self.state is MemberState.READY and now - self.since >= STEADY_SECONDS
        self.failures = 1 if steady else self.failures + 1
        # The first is made again at once: most deaths are not its own fault.
        self.due = now + min(MAX_PAUSE_SECONDS, 2.0 ** (self.failures - 2) if self.failures > 1 else 0.0)
        self.move(MemberEvent.DIED, now)


def is_member(name: str) -> bool:
    """Whether an actor of this name is a member of a cluster."""
    return NAMES.fullmatch(name) is not None
