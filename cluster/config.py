"""What one cluster consists of: the sections of its YAML file.

Every value is checked at construction; :mod:`cluster.config_file` reads the file and names the path of a bad value.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from cluster.log_format import LogFormat, LogLevel
from cluster.scale_section import MAX_REPLICAS, ScaleSection
from cluster.slo_section import SLOSection
from kv_transfer.choice import AUTO, GPUDIRECT_BY, MODES
from kv_transfer.transport import GPUDIRECT, GpuDirect
from protocol.errors import ConfigError
from protocol.rules import check
from protocol.tracing.config import TracingConfig
from protocol.wire_layout import WireDtype

Setting = bool | int | float | str
"""A value of a component's own setting."""

NAME_PATTERN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62})")
MIN_OBJECT_STORE_BYTES = 75 << 20
"""Ray refuses a smaller object store."""
RAY_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that Ray has of itself."""
TRANSPORTS = tuple(mode for mode in MODES if mode != "inproc")
"""Transports that cross processes, as the workers of a cluster do, and the word for any of them."""


class EngineSection(msgspec.Struct, frozen=True, kw_only=True):
    """Engine settings; what is None keeps the engine's own default. Its fields are those of EngineConfig.

    Attributes:
        dtype: "auto", "float32", "float16" or "bfloat16".
        kv_cache_dtype: "auto", "float8_e4m3" or "float8_e5m2".
        device: "auto", "cpu" or "cuda:0" and the like.
        block_size: tokens per KV block.
        order: inner order of a KV block, "NHD" or "HND".
        num_blocks: KV blocks in the pool, the padding block included.
        max_model_len: prompt plus output tokens at most.
        max_batch_tokens: prompt tokens computed in one step.
        max_sequences: sequences in one step.
        attention: attention backend, or "auto".
        prefix_cache: keep and share full blocks of earlier prompts.
        cuda_graphs: "auto" captures steps of decodes where that pays, "off" launches them kernel by kernel.
        cuda_graph_batches: sizes of batch that are captured, ascending; None chooses.
        pool_memory: the pool's memory in place of num_blocks: "8GiB", or "60%" of what is free after the weights.
    """

    dtype: str | None = None
    kv_cache_dtype: str | None = None
    device: str | None = None
    block_size: int | None = None
    order: str | None = None
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    max_sequences: int | None = None
    attention: str | None = None
    prefix_cache: bool | None = None
    cuda_graphs: Literal["auto", "off"] | None = None
    cuda_graph_batches: tuple[int, ...] | None = None
    pool_memory: str | None = None

    def given(self) -> dict[str, Any]:
        """The settings that are not None."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def differing(self, own: EngineSection) -> dict[str, Any]:
        """These settings with those of ``own`` in their place; the pool's size may be said in the other way there."""
        other = {"num_blocks": "pool_memory", "pool_memory": "num_blocks"}
        replaced = {other[name] for name in own.given() if name in other}
        return {name: value for name, value in self.given().items() if name not in replaced} | own.given()


class RoleSection(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one role.

    Attributes:
        replicas: how many.
        cpus: CPU cores that Ray sets aside for each; 0 lets them share.
        gpus: GPUs that Ray sets aside for each.
        resources: Ray's custom resources that are set aside for each, by name, such as {rdma: 1}; a worker is placed
            only where they are.
        placement: "pack" fills nodes one after the other; "spread" puts each worker where the fewest of its role are,
            and a cluster that comes up waits for two machines at least, or for ``ray.machines``.
        threads: compute threads of each; None shares the cores of this machine evenly on our own node, and takes
            ``cpus`` on a joined one.
        engine: differences from the shared engine settings.
        limits: the worker's own settings, by their name in its configuration.
    """

    replicas: int = 1
    cpus: float = 0.0
    gpus: float = 0.0
    resources: dict[str, float] = {}
    placement: Literal["pack", "spread"] = "pack"
    threads: int | None = None
    engine: EngineSection = EngineSection()
    limits: dict[str, Setting] = {}

    def __post_init__(self) -> None:
        check(
            self,
            ("replicas", 1 <= self.replicas <= MAX_REPLICAS, f"in [1, {MAX_REPLICAS}]"),
            ("cpus", 0 <= self.cpus <= 4096, "in [0, 4096]"),
            ("gpus", 0 <= self.gpus <= 64, "in [0, 64]"),
            (
                "resources",
                all(
                    name and name not in RAY_RESOURCES and 0 < amount <= 1e6 for name, amount in self.resources.items()
                ),
                "names of custom resources with numbers over 0 (CPUs and GPUs have keys of their own)",
            ),
            ("threads", self.threads is None or 1 <= self.threads <= 1024, "in [1, 1024], or null"),
        )

    @property
    def reserved(self) -> dict[str, float]:
        """What Ray sets aside for each, by Ray's names."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in wanted.items() if amount}


class SpeculationSection(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding; what is None keeps the default of decode_worker.speculation.Speculation.

    Attributes:
        method: "ngram" guesses from what the prompt and the output have said before; null guesses nothing.
        tokens: most tokens guessed at once.
        min_match, max_match: fewest and most last tokens that are looked up.
    """

    method: str | None = None
    tokens: int | None = None
    min_match: int | None = None
    max_match: int | None = None

    def __post_init__(self) -> None:
        given = self.given()
        check(self, ("method", not given or "method" in given, f"set, for {', '.join(given)} to mean something"))

    def given(self) -> dict[str, Any]:
        """The settings that are not None."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class DecodeSection(RoleSection, frozen=True, kw_only=True):
    """The decode workers.

    Attributes:
        speculation: whether they guess tokens ahead of the model, and how.
    """

    speculation: SpeculationSection = SpeculationSection()


class RouterSection(msgspec.Struct, frozen=True, kw_only=True):
    """The router.

    Attributes:
        host: address that the HTTP server binds.
        port: HTTP port; 0 takes a free one when the cluster comes up.
        hub_port: port that the workers connect to, and the next one for a router that takes this one's place; 0 takes
            free ones.
        api_keys: file of the API keys that may ask, on the router's machine; null lets everybody in.
        tls_certificate, tls_key: files of the router's TLS, in PEM, on its machine; null speaks plain HTTP.
        local_prefill: when a decode worker computes a prompt itself: "never", as a "fallback" while there is no prefill
            worker, then and for "short" prompts, then and where it is predicted to be faster ("auto"), or "always".
        local_prefill_tokens: a prompt of at most so many tokens is short.
        tool_format: how the model writes calls of tools: "auto" as its chat template has it, "hermes" or
            "llama3_json".
        generation_config: "auto" fills in sampling fields that requests leave out from the model's
            generation_config.json, as vLLM does; "none" with neutral values.
        public: let everybody in though ``host`` can be reached from other machines.
        cpus: CPU cores that Ray sets aside for it.
        slo: classes of requests.
        limits: the router's own settings, by their name in its configuration.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    hub_port: int = 0
    api_keys: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    local_prefill: Literal["never", "fallback", "short", "auto", "always"] = "fallback"
    local_prefill_tokens: int = 0
    tool_format: Literal["auto", "hermes", "llama3_json"] = "auto"
    generation_config: Literal["auto", "none"] = "auto"
    public: bool = False
    cpus: float = 0.0
    slo: SLOSection = SLOSection()
    limits: dict[str, Setting] = {}

    def __post_init__(self) -> None:
        check(
            self,
            ("host", bool(self.host.strip()), "a host name or an address"),
            ("port", 0 <= self.port <= 65535, "in [0, 65535]"),
            ("hub_port", 0 <= self.hub_port <= 65533, "in [0, 65533]"),
            ("cpus", 0 <= self.cpus <= 4096, "in [0, 4096]"),
        )
        if self.port and self.port == self.hub_port:
            raise ConfigError(f"hub_port must differ from port, got {self.hub_port} for both", field="hub_port")


class TransferSection(msgspec.Struct, frozen=True, kw_only=True):
    """How KV blocks travel.

    Attributes:
        transport: URI scheme that KV blocks travel by; "auto" takes the best that a pair of workers has.
        streams: connections per pair of workers.
        lease_ttl: seconds that prefill holds blocks with no sign of their reader.
        timeout: seconds without progress after which a transfer fails.
        checksum: send a checksum with the blocks, and take none without.
        layers_per_ship: the last chunk of a prompt ships in ranges of so many layers while its later ones compute; 0
            ships it whole, once its step has ended.
        wire_dtype: element type in which blocks cross; None is that of the decode worker's pool.
        gpudirect: with transport "ucx", whether RDMA reads and writes pools on GPUs itself: "auto" where it can, "on"
            in any case, or "off", by pinned host memory.
        link_gbit: what each worker's network carries, in Gbit/s, for routers to reckon with until it is measured; null
            asks the system.
    """

    transport: str = AUTO
    streams: int = 2
    lease_ttl: float = 30.0
    timeout: float = 10.0
    checksum: bool = False
    layers_per_ship: int = 15
    wire_dtype: WireDtype | None = None
    gpudirect: GpuDirect = "auto"
    link_gbit: float | None = None

    def __post_init__(self) -> None:
        check(
            self,
            ("transport", self.transport in TRANSPORTS, f"one of {', '.join(TRANSPORTS)}"),
            ("streams", 1 <= self.streams <= 64, "in [1, 64]"),
            ("lease_ttl", 0 < self.lease_ttl <= 3600, "in (0, 3600] seconds"),
            ("timeout", 0 < self.timeout <= 3600, "in (0, 3600] seconds"),
            ("layers_per_ship", 0 <= self.layers_per_ship <= 1 << 20, "in [0, 1048576]"),
            ("gpudirect", self.gpudirect in GPUDIRECT, f"one of {', '.join(GPUDIRECT)}"),
            ("link_gbit", self.link_gbit is None or 1e-3 <= self.link_gbit <= 1e5, "in [0.001, 100000], or null"),
        )
        if self.gpudirect == "on":
            for field, fits, wanted in (
                ("transport", self.transport == GPUDIRECT_BY, f"{GPUDIRECT_BY!r}"),
                ("checksum", not self.checksum, "false: the bytes do not pass a CPU"),
                ("wire_dtype", self.wire_dtype is None, "null: nothing is converted"),
            ):
                if not fits:
                    raise ConfigError(
                        f"gpudirect 'on' wants {field} {wanted}, got {getattr(self, field)!r}", field="gpudirect"
                    )


class RaySection(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray cluster that the processes run on.

    Attributes:
        address: of a running Ray cluster to join, or "auto"; None starts a node of our own for this cluster alone.
        machines: of the Ray cluster that was joined that must be there before anything is placed; None waits for two
            where a role is to be spread, else for none.
        cpus, gpus: what our own node offers; None takes what the machine has.
        object_store_memory: bytes; nothing of ours rides on the object store, so the least that Ray takes will do.
        start_timeout: seconds in which everything must be ready.
    """

    address: str | None = None
    machines: int | None = None
    cpus: int | None = None
    gpus: int | None = None
    object_store_memory: int = 100 << 20
    start_timeout: float = 180.0

    def __post_init__(self) -> None:
        check(
            self,
            ("address", self.address is None or bool(self.address.strip()), "host:port, 'auto' or null"),
            ("machines", self.machines is None or 1 <= self.machines <= 4096, "in [1, 4096], or null"),
            ("cpus", self.cpus is None or self.cpus >= 1, "at least 1, or null"),
            ("gpus", self.gpus is None or self.gpus >= 0, "at least 0, or null"),
            (
                "object_store_memory",
                self.object_store_memory >= MIN_OBJECT_STORE_BYTES,
                f"at least {MIN_OBJECT_STORE_BYTES} bytes",
            ),
            ("start_timeout", 0 < self.start_timeout <= 86400, "in (0, 86400] seconds"),
        )
        if self.machines is not None and self.machines > 1 and self.address is None:
            raise ConfigError(
                f"machines must be 1, or null, on a Ray node of our own (address: null), got {self.machines}",
                field="machines",
            )


class LoggingSection(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes write of themselves; ``kvferry logs`` shows it.

    Attributes:
        format: "text" for people, "json" for an object a line, with the ids of requests.
        level: of the least that is written.
    """

    format: LogFormat = "text"
    level: LogLevel = "info"


class TracingSection(msgspec.Struct, frozen=True, kw_only=True):
    """Traces of requests, by OTLP over HTTP; what is not said is as OpenTelemetry's variables (OTEL_...) have it.

    Attributes:
        enabled: whether requests are traced.
        endpoint: URL of a receiver of OTLP over HTTP, with or without its /v1/traces; null takes
            OTEL_EXPORTER_OTLP_ENDPOINT, or port 4318 of each process's machine.
        sample_ratio: of requests that bring no trace of their own, the share that is traced; null takes
            OTEL_TRACES_SAMPLER, or all.
        service_name: the processes' service.name is this and their role, such as kvferry-router; null takes
            OTEL_SERVICE_NAME, or "kvferry" and the role.
        prompts: put the prompts' text into spans.
    """

    enabled: bool = False
    endpoint: str | None = None
    sample_ratio: float | None = None
    service_name: str | None = None
    prompts: bool = False

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> TracingConfig | None:
        """What a process is told; None where nothing is traced."""
        told = TracingConfig(
            endpoint=self.endpoint or "",
            sample_ratio=self.sample_ratio,
            service_name=self.service_name or "",
            prompts=self.prompts,
        )
        return told if self.enabled else None


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster.

    Attributes:
        model: path of a Hugging Face directory, or a known name.
        name: of the cluster; also the Ray namespace of its actors.
        served_name: what clients call the model; None takes the last part of ``model``.
        engine: settings shared by every worker.
        prefill, decode: the workers of each role.
        router, transfer, scale, ray, logging, tracing: see there.

    Raises:
        ConfigError: names the field and the value.
    """

    model: str
    name: str = "kvferry"
    served_name: str | None = None
    engine: EngineSection = EngineSection()
    prefill: RoleSection = RoleSection()
    decode: DecodeSection = DecodeSection()
    router: RouterSection = RouterSection()
    transfer: TransferSection = TransferSection()
    scale: ScaleSection = ScaleSection()
    ray: RaySection = RaySection()
    logging: LoggingSection = LoggingSection()
    tracing: TracingSection = TracingSection()

    def __post_init__(self) -> None:
        check(
            self,
            ("model", bool(self.model.strip()), "a path or a known name"),
            ("name", bool(NAME_PATTERN.fullmatch(self.name)), "letters, digits, '.', '_' or '-', 63 at most"),
            ("served_name", self.served_name is None or bool(self.served_name.strip()), "a non-empty name, or null"),
        )

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_name or Path(self.model).name or self.model

    def section(self, role: Literal["prefill", "decode"]) -> RoleSection:
        """The workers of ``role``."""
        return self.prefill if role == "prefill" else self.decode
