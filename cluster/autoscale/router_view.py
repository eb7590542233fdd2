"""What the actor of a router says of it."""

from __future__ import annotations

import msgspec

from cluster.autoscale.figures import RouterFigures, figures_of
from cluster.scale_section import AutoSection
from router.client import ClusterOverview


class RouterView(msgspec.Struct, frozen=True, kw_only=True):
    """A router at one moment.

    Attributes:
        cluster: as ``/cluster`` has it.
        metrics: as ``/metrics`` has it.
    """

    cluster: ClusterOverview
    metrics: str

    def figures(self, auto: AutoSection) -> RouterFigures:
        """What of it decisions are made by."""
        return figures_of(self.cluster, self.metrics, ttft=auto.ttft, tpot=auto.tpot)
