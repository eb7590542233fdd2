"""Model families by the architecture name in ``config.json``; each is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from protocol.errors import UnsupportedArchitecture

if TYPE_CHECKING:
    from engine.models.model import Model

_FAMILIES = {
    "LlamaForCausalLM": "engine.models.llama:Llama",
    "MistralForCausalLM": "engine.models.llama:Llama",
    "Qwen2ForCausalLM": "engine.models.llama:Llama",
}


def architectures() -> list[str]:
    """Every known architecture name, sorted."""
    return sorted(_FAMILIES)


def family(architecture: str) -> type[Model]:
    """The model class of an architecture.

    Raises:
        UnsupportedArchitecture: none is registered; lists the known ones.
    """
    path = _FAMILIES.get(architecture)
    if path is None:
        raise UnsupportedArchitecture(
            f"architecture {architecture!r} is not supported; known are {', '.join(architectures())}"
        )
    module, _, name = path.partition(":")
    found: type[Model] = getattr(import_module(module), name)
    return found
