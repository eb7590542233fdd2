"""Which prompts a prefill worker can never compute."""

from __future__ import annotations

from protocol.errors import ContextLengthExceeded, InvalidRequest, KVFerryError
from protocol.messages import Prefill


def refusal(request: Prefill, max_model_len: int, vocab_size: int) -> KVFerryError | None:
    """Why ``request`` can never run here; None when it can."""
    length = len(request.token_ids)
    if not 0 < length < max_model_len:
        return ContextLengthExceeded(
            f"prompt has {length} tokens, this model takes 1 to {max_model_len - 1}", field="prompt"
        )
    if max(request.token_ids) >= vocab_size:
        return InvalidRequest(
            f"token id {max(request.token_ids)} is outside the vocabulary of {vocab_size}", field="prompt"
        )
    return None
