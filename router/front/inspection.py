"""The process that :mod:`router.front.inspector` has grammars compiled in: a line in, a line out.

Started as ``python -m router.front.inspection TOKENIZER VOCAB_SIZE``; says "ready" once the tokenizer is read, or what
is the matter. Then it takes JSON arrays ``[kind, text]`` and answers each with a JSON string, what is wrong with it,
or null. It ends when nobody speaks to it any more.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from protocol.errors import KVFerryError
from protocol.grammar import Grammar
from protocol.matchers import compiled, read_tokenizer, reason

CPU_SECONDS = 0.5
"""What compiling one grammar may take: each worker that is to obey it takes as long, and serves nobody meanwhile."""


def main() -> None:
    """See the module."""
    file, vocab_size = sys.argv[1:]
    try:
        tokenizer = read_tokenizer(Path(file), int(vocab_size))
    except KVFerryError as error:
        _say(error.message)
        return
    _say("ready")
    decoder = msgspec.json.Decoder(Grammar)
    for line in sys.stdin.buffer:
        begun = time.process_time()
        matcher = compiled(tokenizer, decoder.decode(line))
        wrong = reason(matcher) if matcher.is_error() else None
        if wrong is None and time.process_time() - begun > CPU_SECONDS:
            wrong = "it takes too long to compile"
        _say(wrong)


def _say(what: str | None) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
