"""Which requests this worker's model cannot take, whatever room there is."""

from __future__ import annotations

from protocol.errors import ContextLengthExceeded, InvalidRequest, KVFerryError
from protocol.messages import Reserve


def refusal(request: Reserve, max_model_len: int, vocab_size: int) -> KVFerryError | None:
    """Why ``request`` is refused, or None; names the field."""
    length = len(request.token_ids) - request.emitted + request.sampling.max_tokens
    if not request.token_ids or length > max_model_len:
        text = f"prompt and output need {length} tokens, this model takes 2 to {max_model_len}"
        return ContextLengthExceeded(text, field="prompt")
    if max(request.token_ids) >= vocab_size:
        text = f"token id {max(request.token_ids)} is outside the vocabulary of {vocab_size}"
        return InvalidRequest(text, field="prompt")
    return None
