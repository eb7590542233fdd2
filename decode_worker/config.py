"""Settings of one decode worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_worker.preemption import PREEMPTIONS, Preemption
from decode_worker.speculation import Speculation
from engine.config import EngineConfig
from kv_transfer.choice import AUTO, MODES
from kv_transfer.transport import GPUDIRECT, GpuDirect, TransportConfig
from protocol.errors import ConfigError
from protocol.tracing.config import TracingConfig
from protocol.wire_layout import WIRE_DTYPES, WireDtype


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """What one decode worker is told at its start.

    Attributes:
        name: unique in the cluster.
        model_name: what clients call the model.
        engine: model, pool and step limits.
        routers: hub endpoint of every router.
        bind_host: address that prefill workers reach this host at.
        transport: URI scheme of the KV receiver; "auto" listens by every transport that works here.
        transfer_timeout: seconds without progress after which a connection is given up.
        transfer_checksum: take no blocks without a checksum.
        secret: what everybody must know who speaks with this worker; empty lets everybody in.
        incarnation: of this life of the name, higher than that of the life before; 0 takes the clock.
        gpudirect: whether RDMA reads and writes a pool on a GPU itself: where it can, always, or never.
        link_gbit: what this host's network carries, in Gbit/s; None asks the system.
        wire_dtype: element type in which blocks cross; None is the pool's own. Another one costs precision.
        max_waiting: requests in the queue for a reservation before new ones are refused.
        wedged_after: seconds without the end of a step, though there is work, after which the worker ends, to be
            started again. A router gives it up before that.
        preemption: how a sequence makes room when the pool is full: "swap", into host memory while there is any left;
            "recompute", by a fresh prefill; "auto", by what is predicted to cost less.
        swap_bytes: host memory at most for sequences that are swapped out. On a CPU its pages are taken only when it
            comes to that; on a GPU all of it is pinned.
        speculation: how tokens are guessed ahead of the model; None guesses none.
        local_prefill: compute prompts here, beside the decode steps, where a router asks for it.
        step_tokens: tokens at most of a step that also computes prompts: those of the running sequences, and as many of
            prompts as are left. None takes the engine's ``max_batch_tokens``. Fewer keep the others' tokens closer
            together, and prompts waiting.
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
    transfer_timeout: float = 10.0
    transfer_checksum: bool = False
    secret: str = field(default="", repr=False)
    incarnation: int = 0
    gpudirect: GpuDirect = "auto"
    link_gbit: float | None = None
    wire_dtype: WireDtype | None = None
    max_waiting: int = 1024
    wedged_after: float = 60.0
    preemption: Preemption = "auto"
    swap_bytes: int = 256 << 20
    speculation: Speculation | None = None
    local_prefill: bool = True
    step_tokens: int | None = None
    tracing: TracingConfig | None = None

    def __post_init__(self) -> None:
        for name, valid, wanted in (
            ("name", bool(self.name), "a non-empty string"),
            ("model_name", bool(self.model_name), "a non-empty string"),
            ("routers", bool(self.routers), "at least one hub endpoint"),
            ("transport", self.transport in MODES, f"one of {', '.join(MODES)}"),
            ("gpudirect", self.gpudirect in GPUDIRECT, f"one of {', '.join(GPUDIRECT)}"),
            ("link_gbit", self.link_gbit is None or 0.0 < self.link_gbit <= 1e6, "in (0, 1e6], or None"),
            ("incarnation", 0 <= self.incarnation < 1 << 63, "in [0, 2**63)"),
            ("transfer_timeout", self.transfer_timeout > 0, "above 0"),
            ("wire_dtype", self.wire_dtype in (None, *WIRE_DTYPES), f"one of {', '.join(WIRE_DTYPES)}, or None"),
            ("max_waiting", self.max_waiting >= 1, "at least 1"),
            ("wedged_after", self.wedged_after > 0, "above 0"),
            ("preemption", self.preemption in PREEMPTIONS, f"one of {', '.join(PREEMPTIONS)}"),
            ("step_tokens", self.step_tokens is None or 1 <= self.step_tokens <= 1 << 31, "in [1, 2**31], or None"),
            ("swap_bytes", 0 <= self.swap_bytes <= 1 << 44, "in [0, 2**44]"),
        ):
            if not valid:
                raise ConfigError(f"{name} must be {wanted}, got {getattr(self, name)!r}", field=name)

    def transfer(self, name: str) -> TransportConfig:
        """The settings of the transports of a worker that is called ``name`` there."""
        return TransportConfig(
            timeout=self.transfer_timeout,
            checksum=self.transfer_checksum,
            secret=self.secret,
            gpudirect=self.gpudirect,
            name=name,
        )
