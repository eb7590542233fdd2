"""A peer contradicts itself: only what it spoke of ends, whoever shares a worker or a batch with that goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from oracle import Oracle
from rack import rack, until
from test_handoff_faults import Gate, check_alive, prompt_of
from test_handoff_forks import ask_together, copies, read

from protocol.forks import Fork
from protocol.ids import Peer, RequestKey
from protocol.messages import Failed, Handover, Message, Prefill, Reserve

STRANGE = RequestKey("strange", 0)


@pytest.mark.parametrize("where", ["next_token", "fork_tokens"])
async def test_a_token_outside_the_vocabulary_costs_a_retry_and_nobody_else_anything(
    tiny_llama_dir: Path, tiny_oracle: Oracle, where: str
) -> None:
    prompt, other = prompt_of(tiny_oracle, 9, 1), prompt_of(tiny_oracle, 7, 2)
    truth, innocent = tiny_oracle.greedy(prompt, 14), tiny_oracle.greedy(other, 60)
    async with rack(tiny_llama_dir) as running:
        (decode,) = running.decode
        gate = Gate(decode, open_for=2)
        beside = asyncio.create_task(running.ask(other, max_tokens=60))
        await until(lambda: gate.held, "the innocent request in its step")
        receive, struck = decode._imports.receive, []

        def tamper(sender: Peer, message: Message) -> None:
            if isinstance(message, Handover) and message.fork_tokens and not struck:
                struck.append(message.key)
                wrong: dict[str, object] = {
                    "next_token": tiny_oracle.vocab_size,
                    "fork_tokens": (message.fork_tokens[0], (1 << 31) - 1),
                }
                message = msgspec.structs.replace(message, **{where: wrong[where]})
            receive(sender, message)

        decode._imports.receive = tamper  # type: ignore[method-assign]
        together = asyncio.create_task(ask_together(running, copies(tuple(prompt), 3, temperature=0.0)))
        await until(lambda: struck, "the hand-over")
        gate.open()
        assert await together == [truth] * 3
        assert (await beside).token_ids == innocent
        metrics = running.service.metrics().decode()
        assert 'kvferry_retries_total{code="integrity_mismatch"} 3.0' in metrics
        assert "engine_failure" not in metrics


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_key_that_is_named_twice_or_in_use_is_refused_and_the_worker_serves_on(
    tiny_llama_dir: Path, tiny_oracle: Oracle, role: str
) -> None:
    prompt = tuple(prompt_of(tiny_oracle, 22, 3))
    truth = tiny_oracle.greedy(list(prompt), 14)
    async with rack(tiny_llama_dir) as running:
        (prefill,), (decode,) = running.prefill, running.decode
        worker = prefill if role == "prefill" else decode
        link, gate = worker._link, Gate(prefill)
        deliver, send = link._on_message, link.send
        opening: list[tuple[Peer, Prefill | Reserve]] = []
        refused: list[RequestKey] = []

        def keep(router: Peer, message: Message) -> None:
            if isinstance(message, Prefill | Reserve):
                opening.append((router, message))
            deliver(router, message)

        def overhear(router: Peer, message: Message) -> bool:
            if isinstance(message, Failed):
                assert message.error.code == "protocol_error"
                refused.append(message.key)
            return send(router, message)

        link._on_message, link.send = keep, overhear  # type: ignore[method-assign]
        with running.service.together(copies(prompt, 3, temperature=0.0)) as each:
            readers = [asyncio.create_task(read(outputs)) for outputs in each]
            await until(lambda: opening and gate.held, "the prompt in its step")
            ((router, opened),) = opening
            new = Fork(RequestKey("new", 0), 1)
            for key, forks, expected in (
                (STRANGE, (new, new), [STRANGE, new.key]),
                (STRANGE, (Fork(STRANGE, 1),), [STRANGE]),
                (STRANGE, (new, opened.forks[0]), [STRANGE, new.key]),
                (STRANGE, (new, Fork(opened.key, 1)), [STRANGE, new.key]),
                (opened.forks[1].key, (), []),
            ):
                deliver(router, msgspec.structs.replace(opened, key=key, forks=forks))
                assert refused == expected
                refused.clear()
            gate.open()
            assert await asyncio.gather(*readers) == [truth] * 3
        await running.settle()
        assert not len(worker._forks)
        await check_alive(running, tiny_oracle)
