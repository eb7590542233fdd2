"""Bounds of the HTTP front."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.errors import ConfigError
from router.slo.classes import SLOConfig
from router.tool_format import TOOL_FORMATS, ToolFormat


@dataclass(frozen=True)
class FrontConfig:
    """Bounds on what clients may send.

    Attributes:
        max_body_bytes: longest request body.
        max_batch: most prompts in one completion request.
        default_max_tokens: output tokens of a completion whose client names no number.
        max_prompt_logprobs: most log-probabilities of prompt tokens in one answer: prompt tokens times one more than
            the alternatives of each, over all choices.
        tool_format: how the model writes calls of tools, a name in ``router.tool_format.TOOL_FORMATS``.
        max_watchers: who watch ``/cluster/events`` at a time.
        max_watchers_each: of them, those with one key, or where no key is needed, from one address.
        watch_interval: seconds from one event there to the next.
        watch_patience: seconds in which a watcher must have taken an event, or it is dropped.
        slo: classes of requests.
        send_timeout: seconds that a client may leave an answer unread before it counts as gone.

    Raises:
        ConfigError: a value is outside its range; names the field and the value.
    """

    max_body_bytes: int = 4 << 20
    max_batch: int = 64
    default_max_tokens: int = 16
    max_prompt_logprobs: int = 1 << 19
    tool_format: ToolFormat = "auto"
    max_watchers: int = 64
    max_watchers_each: int = 16
    watch_interval: float = 1.0
    watch_patience: float = 10.0
    slo: SLOConfig = field(default_factory=SLOConfig)
    send_timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_batch",
            "default_max_tokens",
            "max_prompt_logprobs",
            "max_watchers",
            "max_watchers_each",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", field=name)
        if self.tool_format not in TOOL_FORMATS:
            raise ConfigError(
                f"tool_format must be one of {list(TOOL_FORMATS)}, got {self.tool_format!r}", field="tool_format"
            )
        for name in ("watch_interval", "watch_patience", "send_timeout"):
            seconds = getattr(self, name)
            if not seconds > 0:
                raise ConfigError(f"{name} must be above 0, got {seconds}", field=name)
