"""What two workers send each other is lost with their connection, or never comes: no lease is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from link import Link, link_to
from oracle import Oracle
from pace import allowed
from rack import Rack, rack, until
from test_handoff_faults import Gate, prompt_of

TTL = 600.0
"""Seconds of a lease, which no test waits for."""


@pytest.fixture
async def linked(tiny_llama_dir: Path) -> AsyncIterator[tuple[Rack, Link]]:
    """One worker of either role, and the link by which the decode worker speaks to the other."""
    async with rack(tiny_llama_dir, router={"lease_ttl": TTL}) as running:
        (prefill,) = running.prefill
        assert prefill.profile is not None
        async with link_to(prefill.profile.peer_endpoint) as link:
            prefill.profile = msgspec.structs.replace(prefill.profile, peer_endpoint=link.endpoint)

            def told() -> bool:
                workers = running.service._dispatcher._registry.workers()
                return any(worker.profile.peer_endpoint == link.endpoint for worker in workers)

            await until(told, "the other address")
            yield running, link


@pytest.mark.parametrize("lost", ["grant", "hand-over"])
async def test_what_is_lost_costs_an_attempt_and_waits_for_no_lease(
    linked: tuple[Rack, Link], tiny_oracle: Oracle, lost: str
) -> None:
    running, link = linked
    (prefill,), (decode,) = running.prefill, running.decode
    # The first makes the connection, which a grant could else wait for; nothing of it may be lost.
    prompts = [prompt_of(tiny_oracle, 41, seed) for seed in (1, 2)]
    assert (await running.ask(prompts[0])).token_ids == tiny_oracle.greedy(prompts[0], 12)
    await running.settle()
    gate = Gate(prefill, open_for=1)
    if lost == "grant":
        link.fall_silent()
    asking = asyncio.create_task(running.ask(prompts[1]))
    await until(lambda: gate.held and decode._imports.tally.counts().open, "an import")
    link.fall_silent()
    gate.open()
    await until(lambda: not prefill.load().running, "the end of the prompt")
    link.cut()
    link.resume()
    async with asyncio.timeout(allowed(20.0)):
        answer = await asking
    assert answer.token_ids == tiny_oracle.greedy(prompts[1], 12)


async def test_blocks_that_never_come_though_they_are_handed_over(
    tiny_llama_dir: Path, tiny_oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(tiny_oracle, 41, seed) for seed in (1, 2)]
    by_tcp = {"ship_by": "tcp", "listen_by": "tcp", "transfer": {"transfer_timeout": allowed(1.0)}}
    async with rack(tiny_llama_dir, router={"lease_ttl": TTL}, **by_tcp) as running:
        (prefill,), (decode,) = running.prefill, running.decode
        receiver = decode._imports._receiver
        async with link_to(receiver.address) as link:
            monkeypatch.setattr(type(receiver), "addresses", property(lambda _: (link.endpoint,)))
            assert (await running.ask(prompts[0])).token_ids == tiny_oracle.greedy(prompts[0], 12)
            await running.settle()
            gate = Gate(prefill, open_for=1)
            asking = asyncio.create_task(running.ask(prompts[1]))
            await until(lambda: gate.held and decode._imports.tally.counts().open, "an import")
            link.fall_silent()
            gate.open()
            await until(lambda: decode._imports._handed_over, "the hand-over")
            await until(lambda: not decode._imports._handed_over, "the end of the import", allowed(20.0))
            link.resume()
            async with asyncio.timeout(allowed(20.0)):
                answer = await asking
            assert answer.token_ids == tiny_oracle.greedy(prompts[1], 12)
            await running.settle()
