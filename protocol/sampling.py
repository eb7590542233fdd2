"""How the next token is drawn. The router fills it in, both legs obey it, and it crosses the handoff."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from protocol.errors import InvalidRequest
from protocol.grammar import Grammar

MAX_STOP_TOKEN_IDS = 64
"""Most stop token ids one request may carry, end-of-sequence ids included."""

MAX_BIASED = 1024
"""Most token ids whose logits one request may change."""
MAX_LOGPROBS = 20
"""Most alternatives that one request may ask to see for each token."""

FinishReason = Literal["stop", "length"]
"""Why a request ended well."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one output position, under the model's own logits, before any rule or temperature.

    Attributes:
        logprob: of the drawn token.
        top: ``(token id, log-probability)`` of the most likely tokens, highest first, as many as were asked for.
    """

    logprob: float
    top: Annotated[tuple[tuple[TokenId, float], ...], msgspec.Meta(max_length=MAX_LOGPROBS)] = ()


Bias = Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of one request.

    The draw at output position ``i`` depends on ``(seed, i)``, the logits and the tokens before it alone, so the same
    request gives the same text whatever the batch, the worker, the chunking or a failover.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: smallest set of tokens whose probability reaches this is kept; 1 keeps all.
        top_k: this many most likely tokens are kept; 0 keeps all.
        min_p: tokens less likely than this share of the most likely one are not kept.
        repetition_penalty: logits of tokens that the prompt or the output has are divided by it where positive, and
            multiplied where negative (Keskar et al., 2019).
        presence_penalty: taken from the logits of tokens that the output has.
        frequency_penalty: taken from them once for each time that the output has them.
        logit_bias: ``(token id, what is added to its logit)``, each id once.
        logprobs: how many alternatives' log-probabilities are wanted beside each token's own; None wants none at all.
        seed: 63-bit; the router draws one where the client gave none.
        max_tokens: output tokens at most, counted from the first of the whole request.
        min_tokens: stop tokens are not drawn before this many output tokens.
        stop_token_ids: the request ends when one of these is drawn (it is not part of the text).
        grammar: what the output must look like; None leaves it free. Its end allows the stop tokens.

    Raises:
        InvalidRequest: a value is outside its range; names the field and the value.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[tuple[tuple[TokenId, Bias], ...], msgspec.Meta(max_length=MAX_BIASED)] = ()
    logprobs: int | None = None
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "in [0, 100]"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", 0 <= self.top_k < 1 << 31, "in [0, 2**31)"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "in [0.01, 100]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]"),
            ("logit_bias", len(self.logit_bias) <= MAX_BIASED, f"at most {MAX_BIASED} ids"),
            ("logit_bias", all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias), "of biases in [-100, 100]"),
            ("logit_bias", len(dict(self.logit_bias)) == len(self.logit_bias), "of ids that each stand once"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
            ("seed", 0 <= self.seed < 1 << 63, "in [0, 2**63)"),
            ("max_tokens", 1 <= self.max_tokens < 1 << 31, "in [1, 2**31)"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "in [0, max_tokens]"),
            ("stop_token_ids", len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, f"at most {MAX_STOP_TOKEN_IDS} ids"),
        )
        for name, valid, wanted in checks:
            if not valid:
                raise InvalidRequest(f"{name} must be {wanted}, got {getattr(self, name)!r}", field=name)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the tokens before it other than by the logits."""
        return self.penalises or self.grammar is not None

    @property
    def penalises(self) -> bool:
        """Whether tokens that were there before are less likely to come, or more."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def finish_reason(self, token_id: int, produced: int) -> FinishReason | None:
        """Why the request ends after ``token_id``, its ``produced``-th output token (counted from 1), or None."""
        if token_id in self.stop_token_ids and produced > self.min_tokens:
            return "stop"
        return "length" if produced >= self.max_tokens else None
