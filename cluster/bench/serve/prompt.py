"""Makes the prompt of a trace's request: token ids, or words for servers that take only text. Pure."""

from __future__ import annotations

import hashlib
import struct
from itertools import islice

from cluster.bench.traces.request import BLOCK_TOKENS, TraceRequest

COMMON = """
the of and to in is you that it he was for on are as with his they at be this have from or one had
by word but not what all were we when your can said there use an each which she do how their if will
up other about out many then them these so some her would make like him into time has look two more
write go see
"""
WORDS = COMMON.split()
"""Words that most vocabularies have as one token each, with the space before it."""
_DRAWN = struct.Struct(f"<{BLOCK_TOKENS}I")


class PromptMaker:
    """The same request gives the same prompt, and equal blocks give equal pieces of it.

    Args:
        salt: another one makes other prompts of the same trace, which no cache has seen.
        token_ids: the least and the most that a token may be, of a vocabulary without special tokens there.
    """

    def __init__(self, salt: str, token_ids: tuple[int, int]) -> None:
        self._salt = salt.encode()
        self._least, most = token_ids
        self._span = most - self._least + 1

    def tokens(self, request: TraceRequest) -> list[int]:
        """As many token ids as the request has."""
        least, span = self._least, self._span
        found = (least + number % span for block in request.blocks for number in self._drawn(block))
        return list(islice(found, request.prompt_tokens))

    def text(self, request: TraceRequest) -> str:
        """About as many tokens as the request has, as words."""
        found = (WORDS[number % len(WORDS)] for block in request.blocks for number in self._drawn(block))
        return " ".join(islice(found, request.prompt_tokens))

    def _drawn(self, block: int) -> tuple[int, ...]:
        seed = block.to_bytes(8, "little")
        return _DRAWN.unpack(hashlib.blake2b(seed, digest_size=_DRAWN.size, key=self._salt).digest())
