"""Reads what the router says of its workers and of itself."""

from __future__ import annotations

from router.client.results import decoded
from router.overview import ClusterOverview


def overview_of(body: bytes) -> ClusterOverview:
    """What ``/cluster`` says.

    Raises:
        MalformedFrame: it is something else.
    """
    return decoded(body, ClusterOverview, "the router's view of the cluster cannot be read")
