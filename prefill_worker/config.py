"""Settings of one prefill worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config import EngineConfig
from kv_transfer.choice import AUTO, MODES
from kv_transfer.transport import GPUDIRECT, GpuDirect
from protocol.errors import ConfigError
from protocol.tracing.config import TracingConfig


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """What one prefill worker is told at its start.

    Attributes:
        name: unique in the cluster.
        model_name: what clients call the model.
        engine: model, pool and step limits.
        routers: hub endpoint of every router.
        bind_host: address that decode workers reach this host at.
        transport: URI scheme that KV is shipped by; "auto" takes the best that reaches the decode worker.
        streams: TCP connections per decode worker.
        transfer_timeout: seconds without progress after which a ship fails.
        transfer_checksum: send a checksum with the blocks.
        secret: what everybody must know who speaks with this worker; empty lets everybody in.
        incarnation: of this life of the name, higher than that of the life before; 0 takes the clock.
        gpudirect: whether RDMA reads and writes a pool on a GPU itself: where it can, always, or never.
        link_gbit: what this host's network carries, in Gbit/s; None asks the system.
        layers_per_ship: the last chunk of a prompt ships in ranges of so many layers while its later ones compute;
            0 ships it whole, once its step has ended, and so does a pool on a GPU.
        staging_bytes: memory at most in which blocks are made that cannot go straight from the pool: the decode
            worker's have another form, or the pool is on a GPU.
        max_waiting: prompts in the queue before new ones are refused.
        wedged_after: seconds without the end of a step, though there is work, after which the worker ends, to be
            started again. A router gives it up before that.
        tracing: how its part of traced requests is exported; None exports nothing.

    Raises:
        ConfigError: names the field and the value.
    """

    name: str
    model_name: str
    engine: EngineConfig
    routers: tuple[str, ...]
    bind_host: str = "127.0.0.1"
    transport: str = AUTO
    streams: int = 2
    transfer_timeout: float = 10.0
    transfer_checksum: bool = False
    secret: str = field(default="", repr=False)
    incarnation: int = 0
    gpudirect: GpuDirect = "auto"
    link_gbit: float | None = None
    layers_per_ship: int = 15
    staging_bytes: int = 64 << 20
    max_waiting: int = 1024
    wedged_after: float = 60.0
    tracing: TracingConfig | None = None

    def __post_init__(self) -> None:
        for name, valid, wanted in (
            ("name", bool(self.name), "a non-empty string"),
            ("model_name", bool(self.model_name), "a non-empty string"),
            ("routers", bool(self.routers), "at least one hub endpoint"),
            ("transport", self.transport in MODES, f"one of {', '.join(MODES)}"),
            ("streams", 1 <= self.streams <= 64, "in [1, 64]"),
            ("gpudirect", self.gpudirect in GPUDIRECT, f"one of {', '.join(GPUDIRECT)}"),
            ("link_gbit", self.link_gbit is None or 0.0 < self.link_gbit <= 1e6, "in (0, 1e6], or None"),
            ("incarnation", 0 <= self.incarnation < 1 << 63, "in [0, 2**63)"),
            ("transfer_timeout", self.transfer_timeout > 0, "above 0"),
            ("layers_per_ship", 0 <= self.layers_per_ship <= 1 << 20, "in [0, 1048576]"),
            ("staging_bytes", 1 << 16 <= self.staging_bytes <= 1 << 40, "in [65536, 2**40]"),
            ("max_waiting", self.max_waiting >= 1, "at least 1"),
            ("wedged_after", self.wedged_after > 0, "above 0"),
        ):
            if not valid:
                raise ConfigError(f"{name} must be {wanted}, got {getattr(self, name)!r}", field=name)
