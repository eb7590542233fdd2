"""Settings of a process's traces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from protocol.tracing.tracer import Tracer

PATH = "/v1/traces"
"""Where a receiver of OTLP over HTTP takes spans."""


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """How spans leave a process. What is not said here is as OpenTelemetry's variables (``OTEL_...``) have it.

    Attributes:
        endpoint: URL of a receiver of OTLP over HTTP, with or without its ``/v1/traces``; "" takes
            ``OTEL_EXPORTER_OTLP_ENDPOINT``, or port 4318 of this machine.
        sample_ratio: of requests that bring no trace of their own, the share that is traced; None takes
            ``OTEL_TRACES_SAMPLER``, or all.
        service_name: the processes' ``service.name`` is this and their role, such as ``kvferry-router``; "" takes
            ``OTEL_SERVICE_NAME``, or "kvferry" and the role.
        prompts: put the prompts' text into spans.

    Raises:
        ConfigError: names the field and the value.
    """

    endpoint: str = ""
    sample_ratio: float | None = None
    service_name: str = ""
    prompts: bool = False

    def __post_init__(self) -> None:
        if self.endpoint and not _is_http(self.endpoint):
            raise ConfigError(f"endpoint must be an http:// or https:// URL, got {self.endpoint!r}", field="endpoint")
        if self.sample_ratio is not None and not 0.0 <= self.sample_ratio <= 1.0:
            raise ConfigError(f"sample_ratio must be in [0, 1], got {self.sample_ratio!r}", field="sample_ratio")

    @property
    def url(self) -> str:
        """Where spans are sent to; "" where the environment says it."""
        bare = self.endpoint.rstrip("/")
        return bare if not bare or bare.endswith(PATH) else bare + PATH

    def open(self, role: str, instance: str) -> Tracer:
        """Begin to export; takes a fraction of a second, for OpenTelemetry is imported now.

        Args:
            role: of this process.
            instance: its name, unique among those of the service.

        Raises:
            ConfigError: a variable of the environment cannot be used.
        """
        from protocol.tracing.tracer import Tracer

        return Tracer(self, role, instance)


@asynccontextmanager
async def tracing(config: TracingConfig | None, role: str, instance: str) -> AsyncIterator[Tracer | None]:
    """What a process exports its spans by, until the context is left; None where it is to export none.

    Args:
        config: of the traces.
        role: of this process.
        instance: its name, unique among those of the service.

    Raises:
        ConfigError: a variable of the environment cannot be used.
    """
    if config is None:
        yield None
        return
    tracer = await asyncio.to_thread(config.open, role, instance)
    try:
        yield tracer
    finally:
        await tracer.close()


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False
