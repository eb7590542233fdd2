"""A checkpoint's tokenizer, read from its files alone: text to ids, ids to text, chats to ids.

Used files: ``tokenizer.json`` (needed), ``tokenizer_config.json``, ``chat_template.jinja``,
``additional_chat_templates/tool_use.jinja``, ``generation_config.json`` and ``config.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from protocol.errors import CheckpointUnavailable, InvalidRequest
from protocol.sampling import MAX_STOP_TOKEN_IDS
from router.chat_template import ChatTemplate, Message

LONG_TOKEN = 16
"""Characters of a token, of which a text that is longer is looked at in part first; most have four."""
FEW_TOKENS = 1024
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_SPACE = "\u2581"
"""How SentencePiece writes a space."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE (Radford et al., 2019) writes each byte as: itself where it can be printed."""
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """Text to ids and back.

    Attributes:
        file: ``tokenizer.json``.
        eos_token_ids: end-of-sequence ids: the tokenizer's own, and those of the generation config (of the model
            config where there is none).
        vocab_size: every valid id lies below it; the model's, which may be padded beyond the tokenizer's.
        max_model_len: positions the model was made for, None where the checkpoint does not tell.
        chat_template: None where the checkpoint has none.
        tool_template: of chats with tools; where the checkpoint has none for them, the same.
        generation_config: what ``generation_config.json`` says; empty where there is none.

    Raises:
        CheckpointUnavailable: a file is missing or cannot be read; names it.
        ModelError: the chat template does not compile.
    """

    def __init__(self, directory: str | Path) -> None:
        root = Path(directory)
        self.file = root / "tokenizer.json"
        self._tokenizer = _load(self.file)
        settings = _read_json(root / "tokenizer_config.json")
        model = _read_json(root / "config.json")
        self.generation_config = _read_json(root / "generation_config.json")
        special = {name: text for name in SPECIAL_TOKEN_NAMES if (text := _token_text(settings.get(name)))}
        self.vocab_size = _positive(model.get("vocab_size")) or self._tokenizer.get_vocab_size()
        self.max_model_len = _positive(model.get("max_position_embeddings"))
        self.eos_token_ids = self._find_eos(special.get("eos_token"), self.generation_config, model)
        source, with_tools = _template_sources(root, settings)
        self.chat_template = None if source is None else ChatTemplate(source, special)
        self.tool_template = self.chat_template if with_tools is None else ChatTemplate(with_tools, special)
        self._silent = frozenset(
            number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.context_free = type(self._tokenizer.decoder) is tokenizers.decoders.ByteLevel
        """Whether the text of a list of ids is the text of its parts, put together as bytes."""
        self._added = {number: token.content for number, token in self._tokenizer.get_added_tokens_decoder().items()}

    def _find_eos(self, token: str | None, generation: dict[str, Any], model: dict[str, Any]) -> tuple[int, ...]:
        named = generation.get("eos_token_id")
        if named is None:
            named = model.get("eos_token_id")
        listed = named if isinstance(named, list) else [named]
        own = self._tokenizer.token_to_id(token) if token else None
        valid = (number for number in (own, *listed) if isinstance(number, int) and 0 <= number < self.vocab_size)
        return tuple(dict.fromkeys(valid))[:MAX_STOP_TOKEN_IDS]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of ``text``, with what the tokenizer puts around a sequence unless told not to."""
        # The batch call gives the interpreter lock back while it works, so a long text may go to a thread.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def least_tokens(self, text: str, most: int) -> int:
        """A number of tokens that ``text`` has at least; 0 where nothing was looked at.

        Only the beginning is looked at, and of a text alone that is many times as long as ``most`` tokens mostly are:
        all of its ids would take a hundred times the memory of its characters, and seconds.
        """
        window = max(most, FEW_TOKENS)
        if len(text) <= LONG_TOKEN * window:
            return 0
        # What is cut in two may be more tokens than it was whole, but not so many.
        return max(0, len(self.encode(text[: LONG_TOKEN * window], add_special_tokens=False)) - window)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> tuple[int, ...]:
        """The ids of a chat; arguments as in :meth:`render_chat`, and it raises the same.

        ``add_special_tokens`` tells whether the tokenizer adds what it puts around a sequence; most templates have it.
        """
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a chat.

        Args:
            messages: its turns.
            tools: that the model may call.
            add_generation_prompt: whether it shall be ready for the assistant's turn.

        Raises:
            InvalidRequest: the checkpoint has no chat template, or its template refuses these messages.
        """
        template = self.tool_template if tools else self.chat_template
        if template is None:
            raise InvalidRequest("this model's tokenizer has no chat template; use /v1/completions", field="messages")
        return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, special tokens left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def spell(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, special tokens by their names. A long list may go to a thread."""
        (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)
        return text

    def token_name(self, token_id: int) -> str:
        """How the vocabulary writes ``token_id``; empty for an id without a token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """What ``token_id`` adds to a text, as bytes; a special token's name; nothing for an id without a token."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.context_free:
            return bytes(_BYTE_OF[character] for character in token if character in _BYTE_OF)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()

    def is_silent(self, token_id: int) -> bool:
        """Whether ``token_id`` never gives text: a special token, or a row of a padded vocabulary."""
        return token_id in self._silent or self._tokenizer.id_to_token(token_id) is None


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointUnavailable(f"there is no tokenizer at {path}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointUnavailable(f"the tokenizer at {path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointUnavailable(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointUnavailable(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _token_text(value: object) -> str | None:
    """A special token is written as text, or as an object with ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _template_sources(root: Path, settings: dict[str, Any]) -> tuple[str | None, str | None]:
    """The text of the chat template, and of the one for chats with tools, where there are such."""
    value = settings.get("chat_template")
    listed = value if isinstance(value, list) else [{"name": "default", "template": value}]
    named = {entry.get("name"): entry.get("template") for entry in listed if isinstance(entry, dict)}
    return (
        _template_source(root / "chat_template.jinja", named.get("default")),
        _template_source(root / "additional_chat_templates" / "tool_use.jinja", named.get("tool_use")),
    )


def _template_source(path: Path, otherwise: object) -> str | None:
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return otherwise if isinstance(otherwise, str) else None
