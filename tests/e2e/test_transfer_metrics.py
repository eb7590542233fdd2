"""The transfer metrics, held against the arithmetic of real transfers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from oracle import Oracle
from prometheus_client.parser import text_string_to_metric_families
from rack import Rack, rack, until

from engine.batch import Chunk, Draw
from engine.layer_watch import LayerWatch
from kv_transfer.choice import Chooser
from prefill_worker.worker import PrefillWorker

PROMPT = [5, 9, 11, 200, 3, 17, 40, 41, 42, 99, 7, 8, 10, 30, 31, 32, 33, 34, 35, 36, 37, 38]
BLOCKS = 6
"""Of 4 tokens; the prompt is computed in chunks of 16."""
SHIP = ("ship_seconds", "ship_bytes", "ship_spans", "ship_bytes_per_second")

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(running: Rack) -> Samples:
    """Every sample of a scrape, by name and labels."""
    families = text_string_to_metric_families(running.service.metrics().decode())
    return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}


def read(found: Samples, name: str, **labels: str) -> float:
    return sum(value for (key, had), value in found.items() if key == name and labels.items() <= dict(had).items())


async def scraped(running: Rack, done: Callable[[Samples], bool]) -> Samples:
    """A scrape once the workers' heartbeats have brought what is waited for."""
    found: Samples = {}

    def look() -> bool:
        found.clear()
        found.update(samples(running))
        return done(found)

    await until(look, "the heartbeats")
    return found


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_what_three_requests_shipped(tiny_llama_dir: Path, tiny_oracle: Oracle, scheme: str) -> None:
    truth = tiny_oracle.greedy(PROMPT, 12)
    async with rack(tiny_llama_dir, ship_by=scheme, engine={"prefix_cache": False}) as running:
        for _ in range(3):
            assert (await running.ask(PROMPT)).token_ids == truth
        (profile,) = [worker.profile for worker in running.decode]
        assert profile is not None
        nbytes = 3 * BLOCKS * profile.layout.block_bytes
        found = await scraped(
            running,
            lambda now: (
                read(now, "kvferry_transfer_leases_ended_total", outcome="settled") == 3
                and read(now, "kvferry_transfer_imports_ended_total", outcome="settled") == 3
            ),
        )
        there = {"worker": "prefill-0", "transport": scheme}
        count = read(found, "kvferry_transfer_ship_seconds_count", **there)
        assert 3 <= count <= 6, "a ship per chunk that was granted in time, else one for both"
        for name in SHIP:
            family = f"kvferry_transfer_{name}"
            assert read(found, f"{family}_count") == read(found, f"{family}_count", **there) == count
            assert read(found, f"{family}_bucket", le="+Inf", **there) == count
        assert read(found, "kvferry_transfer_ship_bytes_sum", **there) == nbytes
        assert read(found, "kvferry_kv_bytes_total", role="prefill") == nbytes
        assert read(found, "kvferry_kv_bytes_total", role="decode") == nbytes
        seconds = read(found, "kvferry_transfer_ship_seconds_sum", **there)
        assert seconds == pytest.approx(read(found, "kvferry_kv_seconds_total", role="prefill"))
        # The mean of the rates is at least the rate of the means of ships this alike, and no rate is beyond memory's.
        assert 0 < read(found, "kvferry_transfer_ship_bytes_per_second_sum", **there) / count < 1e12
        assert count <= read(found, "kvferry_transfer_ship_spans_sum", **there) <= 3 * BLOCKS
        for name in ("grant_wait", "settle"):
            assert read(found, f"kvferry_transfer_{name}_seconds_count", **there) == 3
            assert 0 <= read(found, f"kvferry_transfer_{name}_seconds_sum", **there) < 30
        for side in ("leases", "imports"):
            assert read(found, f"kvferry_transfer_{side}_opened_total") == 3
            assert read(found, f"kvferry_transfer_{side}_ended_total") == 3
            assert read(found, f"kvferry_transfer_{side}", state="open") == 0
            assert read(found, f"kvferry_transfer_{side}", state="draining") == 0
        for name in ("refusals_total", "broken_ships_total"):
            assert not [key for key in found if key[0] == f"kvferry_transfer_{name}"]


async def test_what_is_open_what_is_cancelled_and_what_needs_no_transport(
    tiny_llama_dir: Path, tiny_oracle: Oracle
) -> None:
    async with rack(tiny_llama_dir) as running:
        stepper, go_on = running.prefill[0]._stepper, asyncio.Event()
        execute = stepper.execute

        async def held(chunks: Sequence[Chunk], *watch: LayerWatch) -> Sequence[Draw | None]:
            await go_on.wait()
            return await execute(chunks, *watch)

        stepper.execute = held  # type: ignore[method-assign]
        task = asyncio.create_task(running.ask(PROMPT))
        await scraped(
            running,
            lambda now: (
                read(now, "kvferry_transfer_leases", state="open") == 1
                and read(now, "kvferry_transfer_imports", state="open") == 1
            ),
        )
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go_on.set()
        found = await scraped(
            running,
            lambda now: (
                read(now, "kvferry_transfer_leases_ended_total", outcome="cancelled") == 1
                and read(now, "kvferry_transfer_imports_ended_total", outcome="cancelled") == 1
            ),
        )
        assert read(found, "kvferry_transfer_leases", state="open") == 0
        assert read(found, "kvferry_transfer_grant_wait_seconds_count", transport="none") == 1
        assert read(found, "kvferry_transfer_settle_seconds_count") == 0
        truth = tiny_oracle.greedy(PROMPT, 12)
        assert (await running.ask(PROMPT)).token_ids == truth
        assert (await running.ask(PROMPT)).token_ids == truth
        found = await scraped(
            running, lambda now: read(now, "kvferry_transfer_leases_ended_total", outcome="settled") == 2
        )
        # The second time decode has all but the last block.
        shipped = read(found, "kvferry_transfer_ship_bytes_sum")
        profile = running.decode[0].profile
        assert profile is not None
        assert shipped < 2 * BLOCKS * profile.layout.block_bytes
        assert read(found, "kvferry_transfer_leases_opened_total") == 3


async def test_a_broken_ship_is_counted_by_transport_and_error(tiny_llama_dir: Path, tiny_oracle: Oracle) -> None:
    async with rack(tiny_llama_dir, prefill=1, decode=1) as running:
        exports = running.prefill[0]._exports
        offered: list[tuple[str, ...]] = []

        class Misled(Chooser):
            """Sends the first ship to a port that nobody listens at."""

            def choose(self, addresses: tuple[str, ...]) -> str:
                offered.append(addresses)
                return "tcp://127.0.0.1:9" if len(offered) == 1 else super().choose(addresses)

        exports.chooser = Misled("auto")
        answer = await running.ask(PROMPT)
        assert answer.token_ids == tiny_oracle.greedy(PROMPT, 12)
        assert answer.report is not None
        assert answer.report.attempts == 2
        found = await scraped(
            running,
            lambda now: (
                read(now, "kvferry_transfer_leases_ended_total", outcome="settled") == 1
                and read(now, "kvferry_transfer_imports_ended_total", outcome="settled") == 1
            ),
        )
        broken = {"worker": "prefill-0", "role": "prefill", "transport": "tcp", "code": "channel_lost"}
        assert read(found, "kvferry_transfer_broken_ships_total", **broken) == 1
        assert read(found, "kvferry_transfer_broken_ships_total") == 1
        assert read(found, "kvferry_transfer_leases_ended_total", outcome="broken") == 1
        # Prefill's refusal and the router's cancel run a race to the decode worker.
        ended = {
            word: read(found, "kvferry_transfer_imports_ended_total", outcome=word) for word in ("refused", "cancelled")
        }
        assert sum(ended.values()) == 1


async def test_counts_go_on_over_a_restart(tiny_llama_dir: Path) -> None:
    async with rack(tiny_llama_dir, engine={"prefix_cache": False}, router={"local_prefill": "never"}) as running:
        await running.ask(PROMPT)

        def settled(times: int) -> Callable[[Samples], bool]:
            return lambda now: read(now, "kvferry_transfer_leases_ended_total", outcome="settled") == times

        before = await scraped(running, settled(1))
        old = running.prefill.pop()
        await old.stop()
        reborn = PrefillWorker(old.config)
        await reborn.start()
        running.prefill.append(reborn)
        await until(lambda: running.service.health().ready, "the new prefill worker")
        rising = samples(running)
        await running.ask(PROMPT)
        after = await scraped(running, settled(2))
        assert reborn.transfer().opened == 1, "the worker itself began anew"
        for name in ("kvferry_transfer_ship_bytes_sum", "kvferry_kv_bytes_total", "kvferry_prefill_tokens_total"):
            one = read(before, name, worker="prefill-0")
            assert one > 0
            assert read(rising, name, worker="prefill-0") == one
            assert read(after, name, worker="prefill-0") == 2 * one
