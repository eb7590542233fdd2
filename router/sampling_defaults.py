"""Sampling settings for requests that leave them out: neutral ones, or those that the model was published with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from protocol.errors import InvalidRequest, ModelError
from protocol.sampling import SamplingParams

GenerationConfig = Literal["auto", "none"]
"""``auto`` takes what the checkpoint's ``generation_config.json`` says; ``none`` takes none of it."""

GENERATION_CONFIGS: tuple[GenerationConfig, ...] = get_args(GenerationConfig)

FILE = "generation_config.json"
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_COUNTS = {"top_k": "top_k", "max_new_tokens": "max_tokens"}
"""Whole numbers, by their names there and here."""


@dataclass(frozen=True)
class SamplingDefaults:
    """What a field is where a request does not give it; the attributes are those of ``SamplingParams``.

    Attributes:
        max_tokens: of chats; None takes all that the context has left.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @classmethod
    def published(cls, settings: Mapping[str, Any]) -> SamplingDefaults:
        """Those in a checkpoint's generation config, as far as vLLM takes them from there.

        Raises:
            ModelError: a value is none that could be sampled with; names it.
        """
        found: dict[str, Any] = {name: settings[name] for name in _NUMBERS if settings.get(name) is not None}
        found |= {ours: settings[name] for name, ours in _COUNTS.items() if settings.get(name) is not None}
        for name, value in found.items():
            whole = name in _COUNTS.values()
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ModelError(f"{FILE}: {name} must be a {'whole ' if whole else ''}number, got {value!r}")
        if found.get("top_k") == -1:
            found["top_k"] = 0
        try:
            SamplingParams(**found)
        except InvalidRequest as error:
            raise ModelError(f"{FILE}: {error.message}") from error
        return cls(**found)
