"""Which requests this worker cannot take, whatever room there is."""

from __future__ import annotations

from protocol.errors import ContextLengthExceeded, InvalidRequest, KVFerryError, WorkerError
from protocol.ids import Peer
from protocol.messages import Prefill, Reserve


def refusal(request: Reserve | Prefill, max_model_len: int, vocab_size: int) -> KVFerryError | None:
    """Why this worker's model cannot take ``request``, or None; names the field."""
    length = len(request.token_ids) - request.emitted + request.sampling.max_tokens
    if not request.token_ids or length > max_model_len:
        text = f"prompt and output need {length} tokens, this model takes 2 to {max_model_len}"
        return ContextLengthExceeded(text, field="prompt")
    if max(request.token_ids) >= vocab_size:
        text = f"token id {max(request.token_ids)} is outside the vocabulary of {vocab_size}"
        return InvalidRequest(text, field="prompt")
    return None


def prefill_refusal(request: Prefill, me: Peer, *, able: bool) -> KVFerryError | None:
    """Why this worker does not compute a prompt itself, or None."""
    if not able:
        return WorkerError("this decode worker is told to compute no prompts (local_prefill)")
    if request.handoff not in (None, me):
        return WorkerError(f"the prompt is to be handed over to {request.handoff}, this is {me}")
    return None
