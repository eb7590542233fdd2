"""How many output tokens a client wants at most, and how many its prompt leaves room for."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ContextLengthExceeded, InvalidRequest
from router.front.config import FrontConfig


@dataclass(frozen=True)
class OutputBudget:
    """How many output tokens the client wants at most.

    Attributes:
        given: what it said, None when nothing.
        field: the field that said it.
        default: what is taken when nothing was said; None takes all that the context has left.
        least: the lowest number that is allowed; with 0, one token is made and not shown.
    """

    given: int | None
    field: str
    default: int | None
    least: int = 1

    def of(self, prompt_tokens: int, where: str, max_model_len: int | None) -> int:
        """Output tokens for a prompt of this length.

        Raises:
            InvalidRequest: the prompt is empty, or the number is too low.
            ContextLengthExceeded: prompt and output do not fit; names the counts.
        """
        if prompt_tokens == 0:
            raise InvalidRequest(f"{where} is empty", field=where)
        if self.given is not None and self.given < self.least:
            raise InvalidRequest(f"{self.field} must be at least {self.least}, got {self.given}", field=self.field)
        if self.given is not None and max_model_len is None:
            return max(1, self.given)
        if max_model_len is None:
            return self.default or FrontConfig.default_max_tokens
        left = max_model_len - prompt_tokens
        if left < 1:
            raise ContextLengthExceeded(
                f"the model's context is {max_model_len} tokens, and {where} alone has {prompt_tokens}", field=where
            )
        if self.given is None:
            return left if self.default is None else min(self.default, left)
        if self.given > left:
            raise ContextLengthExceeded(
                f"the model's context is {max_model_len} tokens, but {prompt_tokens + self.given} were asked for: "
                f"{prompt_tokens} in {where} and {self.given} in {self.field}",
                field=self.field,
            )
        return max(1, self.given)
