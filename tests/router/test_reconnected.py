"""A worker whose connection was made anew: it lives, and what was on its way is asked for again at once."""

from __future__ import annotations

import asyncio

import pytest
from link import link_to
from scripted_workers import fleet_at, known, until, whole_text
from test_service import PROMPT, sample, serving, stream, whole

PROMPTLY = 20.0
"""Seconds, on a busy machine; nothing else ends these requests before ``request_timeout``."""


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize("cut", ["prefill", "both"])
async def test_what_a_cut_link_has_swallowed_is_asked_for_again(max_tokens: int, cut: str) -> None:
    async with (
        serving(worker_timeout=60.0, reorder_grace=60.0) as (service, _),
        link_to(service.hub_endpoint) as one,
        link_to(service.hub_endpoint) as other,
        fleet_at(one.endpoint) as near,
        fleet_at(other.endpoint) as far,
    ):
        prefill, decode = near.add("prefill", "p0"), far.add("decode", "d0")
        decode._ferry = prefill._ferry
        await known(service, 2)
        # It hears of the request, and whatever it has to say gets lost.
        prefill.deaf = True
        answer = asyncio.create_task(whole(stream(service, max_tokens)))
        await until(lambda: len(prefill.opened) == 1)
        prefill.deaf = False
        for link in (one, other) if cut == "both" else (one,):
            link.cut()
        tokens, last = await asyncio.wait_for(answer, PROMPTLY)
        assert tokens == whole_text(PROMPT, max_tokens)
        assert last.report is not None
        assert last.report.attempts >= 2
        assert sample(service, "kvferry_retries_total", code="worker_lost") >= 1
        await until(lambda: service.health().ready)


async def test_the_last_words_of_a_stream_that_are_lost_are_said_again() -> None:
    async with (
        serving(worker_timeout=60.0) as (service, near),
        link_to(service.hub_endpoint) as link,
        fleet_at(link.endpoint) as far,
    ):
        prefill, decode = near.add("prefill", "p0"), far.add("decode", "d0")
        decode._ferry = prefill._ferry
        await known(service, 2)
        decode.hold = 4
        outputs = stream(service, 8)
        tokens = list((await anext(outputs)).token_ids)
        await until(lambda: decode.told == 3)
        link.fall_silent()
        decode.hold = None
        await until(lambda: decode.told == 7)
        link.cut()
        link.resume()
        rest, last = await asyncio.wait_for(whole(outputs), PROMPTLY)
        assert (*tokens, *rest) == whole_text(PROMPT, 8)
        assert last.report is not None
        assert last.report.attempts == 2
