"""What is measured: one step of one kind, and the grid."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.errors import ConfigError

Kind = Literal["decode", "prefill"]

KINDS: tuple[Kind, ...] = ("decode", "prefill")
MAX_CONTEXT = 128 << 10
MAX_BATCH = 1024


class AttentionCase(msgspec.Struct, frozen=True, kw_only=True):
    """A step of ``batch`` sequences alike.

    Attributes:
        kind: of the step.
        batch: sequences.
        context: tokens that the last query of a sequence sees, its own included.
        queries: tokens of each sequence that the step computes; 1 in a decode.
    """

    kind: Kind
    batch: int
    context: int
    queries: int

    @property
    def cached(self) -> int:
        """Tokens of a sequence that were there before the step."""
        return self.context - self.queries

    def __str__(self) -> str:
        return f"{self.kind}, {self.batch} x {self.queries}, context {self.context}"


class AttentionGrid(msgspec.Struct, frozen=True, kw_only=True):
    """Every kind with every one of its batches and every context is a case.

    Attributes:
        kinds: which.
        decodes: sequences of a decode step.
        prompts: sequences of a prefill step.
        contexts: tokens of each sequence, with those of the step.
        chunk: tokens of a prompt that a step computes; a shorter context is computed whole.

    Raises:
        ConfigError: a list is empty or a value is out of range; names the field and the value.
    """

    kinds: tuple[Kind, ...]
    decodes: tuple[int, ...]
    prompts: tuple[int, ...]
    contexts: tuple[int, ...]
    chunk: int

    def __post_init__(self) -> None:
        for name, values, limit in (
            ("decodes", self.decodes, MAX_BATCH),
            ("prompts", self.prompts, MAX_BATCH),
            ("contexts", self.contexts, MAX_CONTEXT),
            ("chunk", (self.chunk,), MAX_CONTEXT),
        ):
            wrong = [value for value in values if not 1 <= value <= limit]
            if wrong:
                raise ConfigError(f"{name} must lie in [1, {limit}], got {wrong[0]}", field=name)

    def cases(self) -> list[AttentionCase]:
        """The cases, in the order of the options, each once."""
        found = [
            AttentionCase(kind=kind, batch=batch, context=context, queries=1 if kind == "decode" else queries)
            for kind in self.kinds
            for batch in (self.decodes if kind == "decode" else self.prompts)
            for context in self.contexts
            for queries in (min(self.chunk, context),)
        ]
        return list(dict.fromkeys(found))
