"""What is simulated: the workers, their hardware, the router's settings, and what fails."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cluster.simulation.elasticity import Elasticity
from cluster.simulation.profile import EngineProfile
from protocol.errors import ConfigError
from router.local_prefill import LocalPrefill
from router.policy import POLICIES
from router.slo.classes import SLOConfig

MAX_WORKERS = 4096
MAX_ROUTERS = 64
MODES: tuple[LocalPrefill, ...] = ("never", "fallback", "auto", "always")
"""When decode workers compute prompts, without a length from which on they are short."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's process dies.

    Attributes:
        at: seconds since the trace began.
        worker: its name.
        back: seconds until a new life of it sends its first heartbeat; 0 for never.
    """

    at: float
    worker: str
    back: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One run, but for its trace.

    Attributes:
        profile: of every worker's engine.
        prefill, decode: how many workers of either role.
        policy: by which the routers place.
        local_prefill: when decode workers compute prompts, as a router has it.
        routers: how many; requests take turns at them.
        seed: of when each worker's heartbeats come.
        link: of every worker's network, in bytes a second.
        told_link: of it as workers tell routers; 0 tells nothing, None the truth.
        latency: of a message, in seconds.
        ttft_target: the router's; 0 refuses nothing.
        slo: classes of the routers; all requests are of the default one.
        tenants: parts of the conversations that each sends; none for one who sends all.
        ttft, tpot: within which an answer counts as good, in seconds.
        max_requests: live ones of a router.
        failures: what dies.
        elasticity: by which workers come, go and change their role; None leaves them as they are.

    Raises:
        ConfigError: a value is out of range; names field and value.
    """

    profile: EngineProfile
    prefill: int
    decode: int
    policy: str = "cost"
    local_prefill: LocalPrefill = "fallback"
    routers: int = 1
    seed: int = 0
    link: float = 12.5e9
    told_link: float | None = None
    latency: float = 2e-4
    ttft_target: float = 0.0
    ttft: float = 1.0
    tpot: float = 0.05
    max_requests: int = 1 << 20
    failures: tuple[Failure, ...] = field(default=())
    elasticity: Elasticity | None = None
    slo: SLOConfig = field(default_factory=SLOConfig)
    tenants: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}", field="policy")
        for name, value, least, most in (
            ("prefill workers", self.prefill, 1, MAX_WORKERS),
            ("decode workers", self.decode, 1, MAX_WORKERS),
            ("workers", self.prefill + self.decode, 2, MAX_WORKERS),
            ("routers", self.routers, 1, MAX_ROUTERS),
            ("link", self.link, 1e3, 1e15),
            ("told_link", self.told_link or 0.0, 0.0, 1e15),
            ("latency", self.latency, 0.0, 10.0),
            ("ttft_target", self.ttft_target, 0.0, 3600.0),
            ("ttft", self.ttft, 0.0, 3600.0),
            ("tpot", self.tpot, 0.0, 3600.0),
            ("max_requests", self.max_requests, 1, 1 << 20),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{name} must lie in [{least:g}, {most:g}], got {value:g}", field=name)
        for failure in self.failures:
            if failure.worker not in self.names:
                raise ConfigError(f"failures: there is no worker {failure.worker!r}", field="failures")

    @property
    def names(self) -> tuple[str, ...]:
        """Of all workers."""
        return (
            *(f"prefill-{number}" for number in range(self.prefill)),
            *(f"decode-{number}" for number in range(self.decode)),
        )


def parse_workers(text: str) -> tuple[int, int]:
    """``32P32D`` as numbers of prefill and decode workers.

    Raises:
        ConfigError: it is written in another way.
    """
    found = re.fullmatch(r"(\d{1,6})[pP](\d{1,6})[dD]", text)
    if found is None:
        raise ConfigError(f"workers must be as 32P32D, got {text!r}", field="workers")
    return int(found[1]), int(found[2])


def parse_policies(text: str) -> tuple[str, ...]:
    """Names with commas between, ``all`` for every policy; ``-`` and ``_`` are the same.

    Raises:
        ConfigError: there is no such policy; names those there are.
    """
    if text == "all":
        return tuple(POLICIES)
    names = tuple(name.strip().replace("-", "_") for name in text.split(","))
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}", field="policy")
    return names


def parse_local_prefill(text: str) -> LocalPrefill:
    """When decode workers compute prompts.

    Raises:
        ConfigError: there is no such mode, or it needs a length; names those there are.
    """
    for mode in MODES:
        if text == mode:
            return mode
    raise ConfigError(f"local_prefill must be one of {', '.join(MODES)}, got {text!r}", field="local_prefill")


def parse_loads(text: str) -> tuple[float, ...]:
    """``0.5,1,1.5``: shares of what the workers could do.

    Raises:
        ConfigError: one is no number in [0.01, 10].
    """
    loads = []
    for part in text.split(","):
        if re.fullmatch(r"\d{1,2}(\.\d{1,9})?", part.strip()) is None or not 0.01 <= float(part) <= 10.0:
            raise ConfigError(f"load must be numbers in [0.01, 10] with commas between, got {part!r}", field="load")
        loads.append(float(part))
    return tuple(loads)


def parse_failures(text: str) -> tuple[Failure, ...]:
    """``WORKER@AT`` or ``WORKER@AT+BACK``, with commas between.

    Raises:
        ConfigError: one is written in another way.
    """
    failures = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"([a-z]+-\d{1,6})@(\d{1,9}(?:\.\d{1,9})?)(?:\+(\d{1,9}(?:\.\d{1,9})?))?", part)
        if found is None:
            raise ConfigError(f"failures must be as decode-3@20 or decode-3@20+10, got {part!r}", field="failures")
        failures.append(Failure(float(found[2]), found[1], float(found[3] or 0.0)))
    return tuple(failures)


def parse_slo(text: str, profile: EngineProfile) -> tuple[float, float]:
    """``ttft=1,tpot=0.05``, in seconds; what is left out is as the profile has it.

    Raises:
        ConfigError: it is written in another way.
    """
    wanted = {"ttft": profile.ttft, "tpot": profile.tpot}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in wanted or re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value) is None:
            raise ConfigError(f"slo must be as ttft=1,tpot=0.05, got {part!r}", field="slo")
        wanted[name] = float(value)
    return wanted["ttft"], wanted["tpot"]
