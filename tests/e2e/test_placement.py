"""Where requests go, on a cluster with real caches: two prefill and two decode workers, in one process."""

from __future__ import annotations

import time
from pathlib import Path

from pace import allowed
from prometheus_client.parser import text_string_to_metric_families
from rack import MODEL, Rack, rack, until

from router.config import RouterConfig
from router.service import Service


def sample(service: Service, name: str) -> float:
    families = text_string_to_metric_families(service.metrics().decode())
    return sum(found.value for family in families for found in family.samples if found.name == name)


def cached_blocks(cluster: Rack) -> int:
    return sum(len([*worker.pool.index.hashes()]) for worker in cluster.workers())


async def in_step(cluster: Rack, service: Service, deadline: float = 30.0) -> None:
    """Wait until the router knows each cache."""
    await until(lambda: sample(service, "kvferry_index_holdings") == cached_blocks(cluster) > 0, "the index", deadline)


async def test_each_turn_of_a_talk_goes_where_the_last_one_went(tiny_llama_dir: Path) -> None:
    # By what is cached where, alone: the default goes by the workers' paces too, and on a busy machine one may be so
    # slow for a while that a turn is predicted to be answered sooner without its prefix.
    async with rack(tiny_llama_dir, prefill=2, decode=2, router={"policy": "prefix_aware"}) as cluster:
        talks = [[(7 * talk + index) % 90 + 3 for index in range(60)] for talk in range(4)]
        homes: list[set[str]] = [set() for _ in talks]
        for turn in range(3):
            for talk, tokens in enumerate(talks):
                answer = await cluster.ask(tokens, max_tokens=8)
                assert answer.report is not None
                homes[talk].add(answer.report.prefill_worker)
                if turn:
                    # All full blocks of the turn before, whose answer was computed elsewhere.
                    assert answer.report.cached_tokens >= (len(tokens) - 12) // 4 * 4
                tokens += [*answer.token_ids, *range(30 + turn, 34 + turn)]
                await in_step(cluster, cluster.service)
        assert all(len(home) == 1 for home in homes)
        assert len(set.union(*homes)) == 2, "talks are spread"
        assert sample(cluster.service, "kvferry_index_resyncs_total") == 0
        (decision,) = cluster.service.explain(answer.report.request_id)
        assert (decision["prefill"], decision["decode"]) == (answer.report.prefill_worker, answer.report.decode_worker)
        assert decision["predicted"]["cached_tokens"] == answer.report.cached_tokens
        assert decision["measured"]["ttft_s"] > 0
        assert {each["worker"] for each in decision["prefill_candidates"]} == {"prefill-0", "prefill-1"}
        assert {each["worker"] for each in decision["decode_candidates"]} == {"decode-0", "decode-1"}
        assert sample(cluster.service, "kvferry_ttft_prediction_error_seconds_count") == 12


async def test_a_restarted_router_knows_each_cache_in_two_seconds(tiny_llama_dir: Path) -> None:
    async with rack(tiny_llama_dir, prefill=2, decode=1) as cluster:
        for first in range(4):
            await cluster.ask([first + 3, *range(3, 40)])
        await in_step(cluster, cluster.service)
        endpoint = cluster.service.hub_endpoint
        await cluster.service.close()
        successor = Service(RouterConfig(model=MODEL, tokenizer=str(tiny_llama_dir), hub=endpoint, worker_timeout=15.0))
        await successor.start()
        try:
            begun = time.monotonic()
            await until(lambda: successor.health().ready, "a heartbeat of each")
            await in_step(cluster, successor, deadline=allowed(2.0) - (time.monotonic() - begun))
        finally:
            await successor.close()


async def test_tenants_do_not_find_each_others_blocks(tiny_llama_dir: Path) -> None:
    async with rack(tiny_llama_dir, prefill=1, decode=1) as cluster:
        prompt = list(range(3, 35))
        await cluster.ask(prompt, salt="a")
        await in_step(cluster, cluster.service)
        for salt, cached in (("b", 0), ("a", 28)):
            answer = await cluster.ask(prompt, salt=salt)
            assert answer.report is not None
            (decision,) = cluster.service.explain(answer.report.request_id)
            assert decision["predicted"]["cached_tokens"] == answer.report.cached_tokens == cached
            await in_step(cluster, cluster.service)
