"""Turns a cluster's configuration into one order per process, and an order into the configuration of its component."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from cluster.config import ClusterConfig, Setting, SpeculationSection
from cluster.config_file import unknown_key
from cluster.slo_section import SLOSection
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from decode_worker.config import DecodeConfig
    from decode_worker.speculation import Speculation
    from engine.config import EngineConfig
    from prefill_worker.config import PrefillConfig
    from router.config import RouterConfig
    from router.slo.classes import SLOConfig

ActorRole = Literal["router", "prefill", "decode"]

ROUTER_NAME = "router-0"
"""The first one; another one may have taken its place."""


class ActorOrder(msgspec.Struct, frozen=True, kw_only=True):
    """All that one actor is told; Ray keeps it and hands it to each life of the actor.

    Attributes:
        name: of the actor, unique in the cluster.
        role: what it runs.
        config: of the cluster.
        port, hub_port: of the router, the same in each of its lives.
        routers: hub endpoint of every router that may be; empty for a router.
        threads: compute threads.
        secret: what every process of the cluster must know to be spoken with.
        incarnation: of this life of the name.
        restarted: whether a process that was made for the same member has died.
        predecessor: of a router, name of the one that may have the port, and shares it then; or "".
    """

    name: str
    role: ActorRole
    config: ClusterConfig
    port: int = 0
    hub_port: int = 0
    routers: tuple[str, ...] = ()
    threads: int = 1
    secret: str = ""
    incarnation: int = 1
    restarted: bool = False
    predecessor: str = ""

    def __repr__(self) -> str:
        # Whatever is logged or raised with an order in it must not tell the secret.
        return f"ActorOrder(name={self.name!r}, role={self.role!r})"

    @property
    def cpus(self) -> float:
        """CPU cores that Ray sets aside."""
        return self.config.router.cpus if self.role == "router" else self.config.section(self.role).cpus

    @property
    def gpus(self) -> float:
        """GPUs that Ray sets aside."""
        return 0.0 if self.role == "router" else self.config.section(self.role).gpus

    @property
    def resources(self) -> dict[str, float]:
        """Custom resources that Ray sets aside."""
        return {} if self.role == "router" else self.config.section(self.role).resources

    @property
    def reserved(self) -> dict[str, float]:
        """All of that, by Ray's names."""
        return {"CPU": self.cpus} if self.role == "router" else self.config.section(self.role).reserved

    @property
    def spread(self) -> bool:
        """Whether it shall be where the fewest others are."""
        return self.role != "router" and self.config.section(self.role).placement == "spread"

    def environment(self) -> dict[str, str]:
        """Variables that must be there before the process imports a numeric library."""
        return {"OMP_NUM_THREADS": str(self.threads)}


def router_order(
    config: ClusterConfig,
    port: int,
    hub_port: int,
    secret: str = "",
    *,
    name: str = ROUTER_NAME,
    predecessor: str = "",
) -> ActorOrder:
    """The order of a router; ``secret`` is the whole cluster's."""
    return ActorOrder(
        name=name,
        role="router",
        config=config,
        port=port,
        hub_port=hub_port,
        secret=secret,
        predecessor=predecessor,
    )


def worker_orders(config: ClusterConfig, routers: tuple[str, ...], secret: str = "") -> list[ActorOrder]:
    """The orders of all workers, prefill first; ``secret`` is the whole cluster's."""
    roles: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    return [
        worker_order(config, f"{role}-{index}", role, routers, secret)
        for role in roles
        for index in range(config.section(role).replicas)
    ]


def worker_order(
    config: ClusterConfig,
    name: str,
    role: Literal["prefill", "decode"],
    routers: tuple[str, ...],
    secret: str = "",
) -> ActorOrder:
    """The order of one worker; ``secret`` is the whole cluster's."""
    return ActorOrder(
        name=name,
        role=role,
        config=config,
        routers=routers,
        threads=_threads(config, role),
        secret=secret,
    )


def planned_orders(config: ClusterConfig) -> list[ActorOrder]:
    """Every order, before it is known which ports there will be: with ports that stand for them."""
    return [router_order(config, 1, 2), *worker_orders(config, ("tcp://127.0.0.1:2",))]


def router_config(order: ActorOrder, model: Path, host: str) -> RouterConfig:
    """What the router is told; ``host`` is the address that workers reach its host at."""
    from router.config import RouterConfig

    config = order.config
    given = {
        "name": order.name,
        "model": config.model_name,
        "tokenizer": str(model),
        "host": config.router.host,
        "port": order.port,
        "hub": f"tcp://{host}:{order.hub_port}",
        "lease_ttl": config.transfer.lease_ttl,
        "api_keys": config.router.api_keys or "",
        "public": config.router.public,
        "tls_certificate": config.router.tls_certificate or "",
        "tls_key": config.router.tls_key or "",
        "local_prefill": config.router.local_prefill,
        "local_prefill_tokens": config.router.local_prefill_tokens,
        "tool_format": config.router.tool_format,
        "generation_config": config.router.generation_config,
        "slo": _slo(config.router.slo),
        "secret": order.secret,
        "incarnation": order.incarnation,
        "tracing": config.tracing.config(),
    }
    with _at("router"):
        return RouterConfig(**_with_limits("router.limits", RouterConfig, given, config.router.limits))


def prefill_config(order: ActorOrder, model: Path, host: str) -> PrefillConfig:
    """What a prefill worker is told; ``host`` is the address that others reach its host at."""
    from prefill_worker.config import PrefillConfig

    transfer = order.config.transfer
    given = _worker(order, model, host) | {
        "transport": transfer.transport,
        "streams": transfer.streams,
        "layers_per_ship": transfer.layers_per_ship,
    }
    with _at("prefill"):
        return PrefillConfig(**_with_limits("prefill.limits", PrefillConfig, given, order.config.prefill.limits))


def decode_config(order: ActorOrder, model: Path, host: str) -> DecodeConfig:
    """What a decode worker is told; ``host`` is the address that others reach its host at."""
    from decode_worker.config import DecodeConfig

    transfer = order.config.transfer
    given = _worker(order, model, host) | {
        "transport": transfer.transport,
        "wire_dtype": transfer.wire_dtype,
        "speculation": _speculation(order.config.decode.speculation),
    }
    with _at("decode"):
        return DecodeConfig(**_with_limits("decode.limits", DecodeConfig, given, order.config.decode.limits))


def check_orders(orders: list[ActorOrder], model: Path) -> None:
    """Make every component's configuration once, so that a wrong value shows before anything is started.

    Raises:
        ConfigError: names the field's path in the cluster's configuration.
    """
    for order in orders:
        if order.role == "router":
            router_config(order, model, "127.0.0.1")
        elif order.role == "prefill":
            prefill_config(order, model, "127.0.0.1")
        else:
            decode_config(order, model, "127.0.0.1")


def _threads(config: ClusterConfig, role: Literal["prefill", "decode"]) -> int:
    section = config.section(role)
    if section.threads is not None:
        return section.threads
    if config.ray.address is None:
        return max(1, (os.cpu_count() or 1) // (config.prefill.replicas + config.decode.replicas))
    return max(1, int(section.cpus))


def _worker(order: ActorOrder, model: Path, host: str) -> dict[str, Any]:
    return {
        "name": order.name,
        "model_name": order.config.model_name,
        "engine": _engine_config(order, model),
        "routers": order.routers,
        "bind_host": host,
        "transfer_timeout": order.config.transfer.timeout,
        "transfer_checksum": order.config.transfer.checksum,
        "secret": order.secret,
        "incarnation": order.incarnation,
        "gpudirect": order.config.transfer.gpudirect,
        "link_gbit": order.config.transfer.link_gbit,
        "tracing": order.config.tracing.config(),
    }


def _engine_config(order: ActorOrder, model: Path) -> EngineConfig:
    from engine.config import EngineConfig

    assert order.role != "router"
    engine = order.config.engine.differing(order.config.section(order.role).engine)
    with _at("engine"):
        return EngineConfig(model=str(model), threads=order.threads, **engine)


def _speculation(section: SpeculationSection) -> Speculation | None:
    from decode_worker.speculation import Speculation

    with _at("decode.speculation"):
        return Speculation(**section.given()) if section.method is not None else None


def _slo(section: SLOSection) -> SLOConfig:
    from router.slo.classes import SLOClass, SLOConfig

    classes = []
    for name, each in section.classes.items():
        with _at(f"router.slo.classes.{name}"):
            classes.append(SLOClass(name=name, **each.given()))
    with _at("router.slo"):
        return SLOConfig(classes=tuple(classes), **section.given())


def _with_limits(where: str, kind: Any, given: dict[str, Any], limits: Mapping[str, Setting]) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(kind)}
    for name in limits:
        if name in given:
            raise ConfigError(f"{where}.{name} has a place of its own in the file", field=f"{where}.{name}")
        if name not in known:
            raise unknown_key(f"{where}.{name}", name, known - set(given))
    return {**given, **limits}


@contextmanager
def _at(where: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        if error.field is None or error.field.startswith((f"{where}.", "engine.")):
            raise
        raise ConfigError(f"{where}: {error.message}", field=f"{where}.{error.field}") from error
