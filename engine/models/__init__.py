"""Model families by the architecture name in ``config.json``; each is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from protocol.errors import UnsupportedArchitecture

if TYPE_CHECKING:
    import torch

    from engine.models.config import ModelConfig
    from engine.models.model import Model

_FAMILIES = {
    "Gemma2ForCausalLM": "engine.models.gemma2",
    "LlamaForCausalLM": "engine.models.llama",
    "MistralForCausalLM": "engine.models.llama",
    "MixtralForCausalLM": "engine.models.mixtral",
    "Phi3ForCausalLM": "engine.models.phi3",
    "Qwen2ForCausalLM": "engine.models.qwen",
    "Qwen3ForCausalLM": "engine.models.qwen",
}
"""Module of each architecture; its ``build`` is a :class:`Build`."""


class Build(Protocol):
    """Makes an empty model."""

    def __call__(self, config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> Model:
        """Allocate the weights, without values.

        Args:
            config: geometry.
            max_model_len: positions that are served.
            dtype: of the weights.
            device: where they lie.
        """


def architectures() -> list[str]:
    """Every known architecture name, sorted."""
    return sorted(_FAMILIES)


def family(architecture: str) -> Build:
    """What builds models of an architecture.

    Raises:
        UnsupportedArchitecture: none is registered; lists the known ones.
    """
    path = _FAMILIES.get(architecture)
    if path is None:
        raise UnsupportedArchitecture(
            f"architecture {architecture!r} is not supported; known are {', '.join(architectures())}"
        )
    found: Build = import_module(path).build
    return found
