"""How the workers of a simulated cluster come and go."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.scale_section import AutoSection


@dataclass(frozen=True, kw_only=True, slots=True)
class Elasticity:
    """How workers come and go.

    Attributes:
        auto: the planner's section.
        startup: seconds until a worker that is wanted serves: its machine, its process, its weights.
        change: seconds until one that has drained serves in its other role.
    """

    auto: AutoSection
    startup: float = 60.0
    change: float = 1.0
