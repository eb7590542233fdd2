"""Settings of one router."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
from dataclasses import dataclass

from protocol.errors import ConfigError
from protocol.rules import check
from protocol.tracing.config import TracingConfig
from router.local_prefill import LOCAL_PREFILLS, LocalPrefill
from router.policy import POLICIES
from router.sampling_defaults import GENERATION_CONFIGS, GenerationConfig
from router.slo.classes import SLOConfig
from router.tool_format import TOOL_FORMATS, ToolFormat


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Everything a router needs to know before it starts. Times in seconds.

    Attributes:
        model: served name, what clients put into ``model`` and workers announce.
        tokenizer: Hugging Face directory with the tokenizer's files.
        name: of this router, unique among the cluster's routers.
        host, port: of the HTTP server; port 0 takes a free one.
        hub: ZeroMQ address that workers connect to; port 0 takes a free one.
        policy: how workers are chosen, a name in ``router.policy.POLICIES``.
        slow_start: how long a worker that has just joined gets less than its part; the ``cost`` policy heeds it.
        explained_requests: of how many of the last requests it is kept why they went where they went.
        ttft_target: a new request is refused when no worker is predicted to give its first token within this, unless it
            brings a ``ttft_target`` of its own; 0 refuses none.
        local_prefill: when a decode worker computes a prompt itself: "never", as a "fallback" while there is no prefill
            worker, then and for "short" prompts, then and where it is predicted to be faster ("auto"), or "always".
        local_prefill_tokens: a prompt of at most so many tokens is short.
        worker_timeout: a worker that sends no heartbeat this long is lost.
        step_age_bound: a worker whose step loop has not come round this long is lost.
        forget_after: a lost worker is dropped from the listing after this.
        max_attempts: failed attempts of one request at most; preemptions do not count.
        worker_wait: how long a retry waits for a worker to join when there is none.
        worker_wait_first: the same for a first attempt; 0 fails at once.
        breaker_failures: a worker that failed so many requests, and served no more than those, within
            ``breaker_window`` gets no new work while another is there; after ``breaker_cooldown``, which doubles with
            each that fails, up to a minute, a request is tried on it.
        retry_backoff: pause before the second retry in a row, doubled for each further one, at most 1 s.
        reorder_grace: how long decode's tokens may be here before prefill's first one, or prefill's word that a ship
            failed without them.
        stall_timeout: how long a decode worker may send nothing once it has begun to.
        max_requests: live requests at most.
        priority_aging: seconds of waiting that a unit of a request's priority is worth; 0 ignores priorities.
        lease_ttl: told to workers: how long a lease lives without a sign of its reader.
        request_timeout: time limit of one request, and the most a client may ask for.
        stop_grace: how long a stopping server lets open answers go on.
        api_keys: file of the keys that may ask, see ``router.front.keys``; "" lets everybody in.
        tls_certificate, tls_key: files, in PEM, with which clients are spoken to by TLS; both or neither.
        tool_format: how the model writes calls of tools, a name in ``router.tool_format.TOOL_FORMATS``.
        generation_config: "auto" takes the sampling defaults that the model was published with, "none" neutral ones.
        slo: classes of requests, and what they are promised.
        secret: what every worker must know; "" hears everybody.
        incarnation: of this life of the name, higher than that of the life before; 0 takes the clock.
        public: listen on an address that is not this machine's own though there are no keys.
        tracing: how requests are traced; None traces none.

    Raises:
        ConfigError: a value is outside its range; names the field and the value.
    """

    model: str
    tokenizer: str
    name: str = "router-0"
    host: str = "127.0.0.1"
    port: int = 8000
    hub: str = "tcp://127.0.0.1:0"
    policy: str = "cost"
    slow_start: float = 10.0
    explained_requests: int = 1024
    ttft_target: float = 0.0
    local_prefill: LocalPrefill = "fallback"
    local_prefill_tokens: int = 0
    worker_timeout: float = 2.0
    step_age_bound: float = 10.0
    forget_after: float = 600.0
    max_attempts: int = 4
    worker_wait: float = 5.0
    worker_wait_first: float = 0.0
    breaker_failures: int = 5
    breaker_window: float = 30.0
    breaker_cooldown: float = 5.0
    retry_backoff: float = 0.05
    reorder_grace: float = 2.0
    stall_timeout: float = 60.0
    max_requests: int = 4096
    priority_aging: float = 2.0
    lease_ttl: float = 30.0
    request_timeout: float = 600.0
    stop_grace: float = 5.0
    api_keys: str = ""
    public: bool = False
    tls_certificate: str = ""
    tls_key: str = ""
    tool_format: ToolFormat = "auto"
    generation_config: GenerationConfig = "auto"
    slo: SLOConfig = dataclasses.field(default_factory=SLOConfig)
    secret: str = dataclasses.field(default="", repr=False)
    incarnation: int = 0
    tracing: TracingConfig | None = None

    def __post_init__(self) -> None:
        for field in ("model", "tokenizer", "host"):
            check(self, (field, bool(getattr(self, field)), "not empty"))
        check(
            self,
            ("name", re.fullmatch(r"[A-Za-z0-9._-]{1,128}", self.name) is not None, "1 to 128 of A-Z a-z 0-9 . _ -"),
        )
        check(self, ("model", len(self.model) <= 256, "at most 256 characters"))
        check(self, ("port", 0 <= self.port <= 65535, "in [0, 65535]"))
        check(self, ("hub", self.hub.startswith(("tcp://", "ipc://")), "a tcp:// or ipc:// address"))
        if not self.api_keys and not self.public and not _is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r} can be reached from elsewhere, and there are no api_keys: name a file of them, "
                "or set public to let everybody in",
                field="host",
            )
        for field, other in (("tls_certificate", "tls_key"), ("tls_key", "tls_certificate")):
            if getattr(self, other) and not getattr(self, field):
                raise ConfigError(f"{field} must be given with {other}", field=field)
        check(self, ("incarnation", 0 <= self.incarnation < 1 << 63, "in [0, 2**63)"))
        check(self, ("policy", self.policy in POLICIES, f"one of {sorted(POLICIES)}"))
        check(self, ("local_prefill", self.local_prefill in LOCAL_PREFILLS, f"one of {list(LOCAL_PREFILLS)}"))
        check(self, ("local_prefill_tokens", 0 <= self.local_prefill_tokens <= 1 << 20, "in [0, 2**20]"))
        check(self, ("tool_format", self.tool_format in TOOL_FORMATS, f"one of {list(TOOL_FORMATS)}"))
        check(
            self,
            ("generation_config", self.generation_config in GENERATION_CONFIGS, f"one of {list(GENERATION_CONFIGS)}"),
        )
        for field in (
            "worker_timeout",
            "step_age_bound",
            "forget_after",
            "lease_ttl",
            "request_timeout",
            "stall_timeout",
            "breaker_window",
            "breaker_cooldown",
        ):
            check(self, (field, 0.0 < getattr(self, field) < math.inf, "over 0 and finite"))
        check(self, ("explained_requests", 0 <= self.explained_requests <= 1 << 20, "in [0, 2**20]"))
        for field in (
            "slow_start",
            "ttft_target",
            "worker_wait",
            "worker_wait_first",
            "retry_backoff",
            "reorder_grace",
            "stop_grace",
        ):
            check(self, (field, 0.0 <= getattr(self, field) < math.inf, "at least 0 and finite"))
        check(self, ("priority_aging", 0.0 <= self.priority_aging <= 3600.0, "in [0, 3600]"))
        for field in ("max_attempts", "max_requests", "breaker_failures"):
            check(self, (field, 1 <= getattr(self, field) <= 1 << 20, "in [1, 2**20]"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
