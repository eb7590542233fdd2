"""What is measured: steps of one kind, and the grid."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.errors import ConfigError

Kind = Literal["decode", "prefill"]

KINDS: tuple[Kind, ...] = ("decode", "prefill")
MIN_CONTEXT = 3
"""Two tokens stand before the first step of a decode, and one is drawn in a step that does not count."""
MAX_CONTEXT = 128 << 10
MAX_BATCH = 1024
MAX_STEPS = 1024


class EngineCase(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences alike.

    Attributes:
        kind: whether their next tokens are computed, or their prompts.
        batch: how many.
        context: tokens that the last query of a prompt, or the first step that counts of a decode, sees of each.
    """

    kind: Kind
    batch: int
    context: int

    def room(self, steps: int) -> int:
        """Tokens of each sequence once ``steps`` steps of a decode, or the prompt and its first token, are through."""
        return self.context + (steps if self.kind == "decode" else 1)

    def __str__(self) -> str:
        return f"{self.kind}, {self.batch} x {self.context}"


class EngineGrid(msgspec.Struct, frozen=True, kw_only=True):
    """Every kind with every one of its batches and every context is a case.

    Attributes:
        kinds: which.
        decodes: sequences of a decode.
        prompts: sequences of a prefill.
        contexts: tokens of each sequence.
        steps: of a decode, one after the other, that a round takes.
        max_prompt_tokens: a round of prefill with more of them in all is left out.

    Raises:
        ConfigError: a value is out of range; names the field and the value.
    """

    kinds: tuple[Kind, ...]
    decodes: tuple[int, ...]
    prompts: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    max_prompt_tokens: int

    def __post_init__(self) -> None:
        for name, values, least, most in (
            ("decodes", self.decodes, 1, MAX_BATCH),
            ("prompts", self.prompts, 1, MAX_BATCH),
            ("contexts", self.contexts, MIN_CONTEXT, MAX_CONTEXT),
            ("steps", (self.steps,), 1, MAX_STEPS),
        ):
            wrong = [value for value in values if not least <= value <= most]
            if wrong:
                raise ConfigError(f"{name} must lie in [{least}, {most}], got {wrong[0]}", field=name)

    def cases(self) -> list[EngineCase]:
        """The cases, in the order of the options, each once."""
        found = [
            EngineCase(kind=kind, batch=batch, context=context)
            for kind in self.kinds
            for batch in (self.decodes if kind == "decode" else self.prompts)
            for context in self.contexts
        ]
        return list(dict.fromkeys(found))
