"""Tells whether a client's grammar can be used, in a process that is ended when that takes too long.

A few bytes of a schema can ask for an automaton of any size, and no setting of the library bounds the time that goes
into it. So the first to compile a grammar is a process of its own, started when one is first asked for; what it has let
pass, the workers compile, too.

Life cycle: made idle, :meth:`Inspector.check` at will, :meth:`Inspector.close` once.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import msgspec

from protocol.errors import InvalidRequest, Overloaded, UnsupportedField
from protocol.grammar import MAX_GRAMMAR, Grammar

DEADLINE = 3.0
"""Seconds for one grammar, on a machine that may be busy; the process itself counts what it computes."""
START_DEADLINE = 60.0
"""Seconds that the process may take to start."""
LONGEST_QUEUE = 64
"""Grammars that wait to be looked at."""
KNOWN_BYTES = 4 << 20
"""Lengths of the grammars whose verdict is remembered, together at most."""
LINE_BYTES = 8 * MAX_GRAMMAR


class Inspector:
    """See the module.

    Args:
        tokenizer: the served checkpoint's ``tokenizer.json``.
        vocab_size: of the served model.
    """

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        self._command = (sys.executable, "-m", "router.front.inspection", str(tokenizer), str(vocab_size))
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._known: OrderedDict[Grammar, str | None] = OrderedDict()
        self._known_bytes = 0

    async def check(self, grammar: Grammar, field: str) -> None:
        """Return if ``grammar`` can be used.

        Raises:
            InvalidRequest: it cannot; names the ``field`` that it came by, and why.
            UnsupportedField: this model's tokenizer cannot be used for grammars.
            Overloaded: too many wait for the same.
        """
        if grammar not in self._known:
            if self._waiting >= LONGEST_QUEUE:
                raise Overloaded(f"{self._waiting} grammars wait to be looked at", field=field)
            self._waiting += 1
            try:
                async with self._turn:
                    if grammar not in self._known:
                        self._remember(grammar, await self._verdict(grammar, field))
            finally:
                self._waiting -= 1
        self._known.move_to_end(grammar)
        wrong = self._known[grammar]
        if wrong is not None:
            raise InvalidRequest(f"{field} cannot be used: {wrong}", field=field)

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            # The pipes' transports are closed one turn of the loop after the process is known to be gone.
            await asyncio.sleep(0)

    def _remember(self, grammar: Grammar, wrong: str | None) -> None:
        self._known[grammar] = wrong
        self._known_bytes += len(grammar.text)
        while self._known_bytes > KNOWN_BYTES:
            forgotten, _ = self._known.popitem(last=False)
            self._known_bytes -= len(forgotten.text)

    async def _verdict(self, grammar: Grammar, field: str) -> str | None:
        process = self._process or await self._started(field)
        assert process.stdin is not None, "asked for"
        assert process.stdout is not None, "asked for"
        try:
            async with asyncio.timeout(DEADLINE):
                process.stdin.write(msgspec.json.encode(grammar) + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
            return msgspec.json.decode(line, type=str | None)
        except TimeoutError:
            await self.close()
            return "it takes too long to compile"
        except (OSError, msgspec.DecodeError):
            await self.close()
            return "it cannot be compiled"
        except BaseException:
            # Its answer would be taken for the next one's.
            await self.close()
            raise

    async def _started(self, field: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=LINE_BYTES
        )
        self._process = process
        assert process.stdout is not None, "asked for"
        try:
            async with asyncio.timeout(START_DEADLINE):
                said = msgspec.json.decode(await process.stdout.readline(), type=str)
        except (TimeoutError, msgspec.DecodeError) as error:
            await self.close()
            raise Overloaded("grammars cannot be looked at just now", field=field) from error
        except BaseException:
            await self.close()
            raise
        if said != "ready":
            await self.close()
            raise UnsupportedField(said, field=field)
        return process
