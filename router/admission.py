"""Refusing what no worker could take in."""

from __future__ import annotations

from protocol.errors import ContextLengthExceeded, InvalidRequest
from protocol.messages import MAX_SALT, MAX_TOKENS
from protocol.sampling import MAX_LOGPROBS
from router.front.generation import Generation
from router.priority import MAX_PRIORITY

_MAX_TOKEN_ID = (1 << 31) - 1


def check_generation(generation: Generation) -> None:
    """Refuse what would break a bound of the wire: a worker drops such a frame, and nobody would answer.

    Raises:
        InvalidRequest: names the field and the value.
        ContextLengthExceeded: the prompt is longer than any message may be.
    """
    prompt, stops = generation.token_ids, generation.sampling.stop_token_ids
    if not prompt:
        raise InvalidRequest("token_ids must not be empty", field="token_ids")
    if len(prompt) > MAX_TOKENS:
        raise ContextLengthExceeded(
            f"{len(prompt)} prompt tokens are over the bound of {MAX_TOKENS}", field="token_ids"
        )
    for name, ids in (("token_ids", prompt), ("stop_token_ids", stops)):
        if ids and not (min(ids) >= 0 and max(ids) <= _MAX_TOKEN_ID):
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidRequest(f"{name} must lie in [0, {_MAX_TOKEN_ID}], got {bad}", field=name)
    if len(generation.cache_salt) > MAX_SALT:
        got = len(generation.cache_salt)
        raise InvalidRequest(f"cache_salt must have at most {MAX_SALT} characters, got {got}", field="cache_salt")
    wanted = generation.prompt_logprobs
    if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS:
        raise InvalidRequest(f"prompt_logprobs must be in [0, {MAX_LOGPROBS}], got {wanted}", field="prompt_logprobs")
    if not -MAX_PRIORITY <= generation.priority <= MAX_PRIORITY:
        allowed = f"in [-{MAX_PRIORITY}, {MAX_PRIORITY}]"
        raise InvalidRequest(f"priority must be {allowed}, got {generation.priority}", field="priority")
    if generation.timeout is not None and not generation.timeout > 0:
        raise InvalidRequest(f"timeout must be over 0, got {generation.timeout!r}", field="timeout")
