"""One side refuses what the other has taken on already: nothing stays behind, and no text is half a prompt's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from oracle import Oracle
from pace import allowed
from rack import Rack, rack, until
from test_handoff_faults import check_alive, prompt_of

from protocol.errors import ContextLengthExceeded
from protocol.ids import Peer
from protocol.messages import Message, Reserve

TIMES = 100
PROMPT, OUTPUT = 30, 40


class Latecomer:
    """Holds back what asks the decode worker for room."""

    def __init__(self, running: Rack) -> None:
        self._link = running.decode[0]._link
        self._deliver = self._link._on_message
        self._link._on_message = self._receive
        self.held: list[tuple[Peer, Reserve]] = []

    def _receive(self, router: Peer, message: Message) -> None:
        if isinstance(message, Reserve):
            self.held.append((router, message))
        else:
            self._deliver(router, message)

    def let_in(self) -> None:
        self._deliver(*self.held.pop())

    def leave(self) -> None:
        self._link._on_message = self._deliver


async def test_decode_refuses_a_hundred_times_after_prefill_has_finished(
    tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    async with rack(tiny_llama_dir, engine={"prefix_cache": False}) as running:
        (prefill,), (decode,) = running.prefill, running.decode
        free = [worker.load().pool.free for worker in running.workers()]
        # It takes less than it has announced: nobody can know before it says so.
        longest, decode._max_model_len = decode._max_model_len, PROMPT + OUTPUT - 1
        late = Latecomer(running)

        def finished() -> bool:
            load = prefill.load()
            return bool(late.held) and load.pool.exported == -(-PROMPT // 4) and not load.running

        for seed in range(TIMES):
            asked = asyncio.create_task(running.ask(prompt_of(tiny_oracle, PROMPT, seed), max_tokens=OUTPUT))
            await until(finished, "the end of prefill")
            late.let_in()
            with pytest.raises(ContextLengthExceeded, match="prompt and output need 70 tokens"):
                await asked
            await running.settle(allowed(1.0))
        assert [worker.load().pool.free for worker in running.workers()] == free
        decode._max_model_len = longest
        late.leave()
        await check_alive(running, tiny_oracle)


@pytest.mark.parametrize("refuses", ["prefill", "decode", "both"])
async def test_a_prompt_longer_than_a_worker_takes_is_refused_and_never_begun(
    tiny_llama_dir: Path, tiny_oracle: Oracle, refuses: str
) -> None:
    async with rack(tiny_llama_dir) as running:
        (prefill,), (decode,) = running.prefill, running.decode
        lengths = prefill._max_model_len, decode._max_model_len
        if refuses != "decode":
            prefill._max_model_len = PROMPT - 1
        if refuses != "prefill":
            decode._max_model_len = PROMPT - 1
        # The client hears of it within a second, and within another nothing is left.
        async with asyncio.timeout(allowed(1.0)):
            with pytest.raises(ContextLengthExceeded, match=r"tokens, this model takes"):
                await running.ask(prompt_of(tiny_oracle, PROMPT))
        await running.settle(allowed(1.0))
        assert decode.load().decode_tokens == 0
        prefill._max_model_len, decode._max_model_len = lengths
        await check_alive(running, tiny_oracle)
