"""Text to token ids and back for clients, in the shapes of vLLM's ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from router.front.parsing import chat_messages, check_token_ids, parse_detokenize, parse_tokenize
from router.front.tools import told_tools
from router.tokenizer import Tokenizer


class TokenDesk:
    """Answers of one tokenizer. A long body may go to a thread.

    Args:
        tokenizer: of the served checkpoint.
        check_model: raises where a model's name is not the served one.
        max_model_len: gives prompt plus output tokens at most; None while that is not known.
    """

    def __init__(
        self, tokenizer: Tokenizer, check_model: Callable[[str], None], max_model_len: Callable[[], int | None]
    ) -> None:
        self._tokenizer = tokenizer
        self._check_model = check_model
        self._max_model_len = max_model_len

    def tokenize(self, body: bytes) -> bytes:
        """The JSON that answers ``body``.

        Raises:
            InvalidRequest: ``body`` is no such request, or the chat template refuses its messages; names the field.
            UnknownModel: it names another model.
        """
        request = parse_tokenize(body)
        if request.model is not None:
            self._check_model(request.model)
        if request.messages is not None:
            token_ids = self._tokenizer.encode_chat(
                chat_messages(request.messages),
                tools=told_tools(request.tools or []),
                add_generation_prompt=request.add_generation_prompt is not False,
                add_special_tokens=bool(request.add_special_tokens),
            )
        else:
            token_ids = self._tokenizer.encode(
                request.prompt or "", add_special_tokens=request.add_special_tokens is not False
            )
        names = [self._tokenizer.token_name(token_id) for token_id in token_ids] if request.return_token_strs else None
        return msgspec.json.encode(
            {
                "count": len(token_ids),
                "max_model_len": self._max_model_len(),
                "tokens": token_ids,
                "token_strs": names,
            }
        )

    def detokenize(self, body: bytes) -> bytes:
        """The JSON that answers ``body``; raises as :meth:`tokenize`, and where an id is no token's."""
        request = parse_detokenize(body)
        if request.model is not None:
            self._check_model(request.model)
        check_token_ids(request.tokens, self._tokenizer.vocab_size, "tokens")
        return msgspec.json.encode({"prompt": self._tokenizer.spell(request.tokens)})
