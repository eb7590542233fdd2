"""What shall work on this machine: a cluster file's wishes, or those of the default cluster."""

from __future__ import annotations

import msgspec

from cluster.config import ClusterConfig
from cluster.doctor.finding import Verdict


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What the checks hold the machine against.

    Attributes:
        config: of the cluster.
        given: whether the user named its file; else it is the default cluster.
    """

    config: ClusterConfig
    given: bool = False

    @property
    def here(self) -> bool:
        """Whether all of the cluster runs on this machine."""
        return self.config.ray.address is None

    @property
    def unmet(self) -> Verdict:
        """How bad it is when this machine lacks what the cluster wants."""
        return "broken" if self.given and self.here else "warning"

    @property
    def gpus(self) -> int:
        """GPUs that the cluster wants."""
        config = self.config
        named = [section.engine.device or config.engine.device or "auto" for section in (config.prefill, config.decode)]
        reserved = sum(section.replicas * section.gpus for section in (config.prefill, config.decode))
        return max(int(reserved), 1 if any(device.startswith("cuda") for device in named) else 0)

    @property
    def workers(self) -> int:
        """Prefill and decode workers together."""
        return self.config.prefill.replicas + self.config.decode.replicas

    @property
    def ports(self) -> tuple[tuple[str, str, int], ...]:
        """Field, host and port of each port that the file fixes."""
        router = self.config.router
        hub_host = "127.0.0.1" if self.here else ""
        hub, spare = router.hub_port, router.hub_port + (2 if router.port == router.hub_port + 1 else 1)
        hubs = [("router.hub_port", hub_host, each) for each in (hub, spare) if hub]
        return (*([("router.port", router.host, router.port)] if router.port else []), *hubs)
