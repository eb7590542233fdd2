"""How many workers there are while a cluster is up: how they leave, and what they come and go by."""

from __future__ import annotations

import msgspec

from protocol.errors import ConfigError
from protocol.ids import Role
from protocol.rules import check

MAX_REPLICAS = 1024


class RoleBounds(msgspec.Struct, frozen=True, kw_only=True):
    """How few and how many workers of one role there may be by load.

    Attributes:
        min: at least so many.
        max: at most so many.
    """

    min: int = 1
    max: int = 4

    def __post_init__(self) -> None:
        check(
            self,
            ("min", 1 <= self.min <= MAX_REPLICAS, f"in [1, {MAX_REPLICAS}]"),
            ("max", self.min <= self.max <= MAX_REPLICAS, f"in [min, {MAX_REPLICAS}], min is {self.min}"),
        )


class AutoSection(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that come and go by load.

    Attributes:
        enabled: whether they do; ``kvferry autoscale --dry-run`` tells what would be done either way.
        ttft: seconds to the first token, within which it shall come.
        tpot: seconds per further token, within which they shall come.
        percentile: share of the requests for which that shall be so.
        prefill, decode: bounds of each role.
        max_workers: of both roles together; null bounds each by itself.
        interval: seconds between two decisions.
        window: seconds of load that a decision to have more workers looks at.
        headroom: share by which load must fit fewer workers before one is let go.
        down_after: seconds for which fewer workers must have been enough before one is let go.
        cooldown: seconds after a change before a worker is let go, and for which a role must have needed fewer workers
            before one of its own takes the other role.
    """

    enabled: bool = False
    ttft: float = 1.0
    tpot: float = 0.1
    percentile: float = 0.9
    prefill: RoleBounds = RoleBounds()
    decode: RoleBounds = RoleBounds()
    max_workers: int | None = None
    interval: float = 5.0
    window: float = 15.0
    headroom: float = 0.2
    down_after: float = 300.0
    cooldown: float = 60.0

    def __post_init__(self) -> None:
        check(
            self,
            ("ttft", 0 < self.ttft <= 3600, "in (0, 3600] seconds"),
            ("tpot", 0 < self.tpot <= 3600, "in (0, 3600] seconds"),
            ("percentile", 0.5 <= self.percentile < 1, "in [0.5, 1)"),
            ("interval", 0.1 <= self.interval <= 3600, "in [0.1, 3600] seconds"),
            (
                "window",
                self.interval <= self.window <= 3600,
                f"in [interval, 3600] seconds, interval is {self.interval}",
            ),
            ("headroom", 0 <= self.headroom <= 10, "in [0, 10]"),
            (
                "down_after",
                self.window <= self.down_after <= 86400,
                f"in [window, 86400] seconds, window is {self.window}",
            ),
            ("cooldown", 0 <= self.cooldown <= 86400, "in [0, 86400] seconds"),
        )
        least = self.prefill.min + self.decode.min
        if self.max_workers is not None and self.max_workers < least:
            raise ConfigError(
                f"max_workers must be at least {least}, the least of both roles, got {self.max_workers}",
                field="max_workers",
            )

    def bounds(self, role: Role) -> RoleBounds:
        """Of ``role``."""
        return self.prefill if role == "prefill" else self.decode


class ScaleSection(msgspec.Struct, frozen=True, kw_only=True):
    """How workers come and go while the cluster is up.

    Attributes:
        drain_timeout: seconds that a worker that leaves gets to finish what it has; the rest goes on elsewhere.
        auto: whether, and within what bounds, there are as many as load and targets want.
    """

    drain_timeout: float = 300.0
    auto: AutoSection = AutoSection()

    def __post_init__(self) -> None:
        check(self, ("drain_timeout", 0 <= self.drain_timeout <= 86400, "in [0, 86400] seconds"))
