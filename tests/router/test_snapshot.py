"""The overview of a cluster: what it counts, what it makes of it, and what it keeps to itself."""

from __future__ import annotations

import msgspec
import pytest
from scripted_workers import until
from test_service import pair, serving, stream, whole
from worker_facts import heartbeat, pool, worker

from protocol.errors import AttemptsExhausted, EngineFailure
from protocol.histogram import BYTES, Observations
from protocol.transfer_counts import PathCounts, TransferCounts
from router.breaker import BreakerState, BreakerView
from router.overview import Alert, ClusterOverview, Handoffs, Latency, LiveStates, TransportUse, WorkerOverview
from router.service import Service
from router.snapshot import alerts_of, worker_overview


def told(service: Service) -> ClusterOverview:
    return msgspec.convert(service.cluster(), ClusterOverview)


async def test_it_counts_what_clients_were_given() -> None:
    async with serving() as (service, fleet):
        _, decode = await pair(service, fleet)
        before = told(service)
        await whole(stream(service, 6))
        decode.hold = 2
        outputs = stream(service)
        await anext(outputs)
        await until(lambda: told(service).requests == LiveStates(decoding=1))
        during = told(service)
        await outputs.aclose()
        after = told(service)
    assert before.latency["ttft"].counts == (0,) * (len(before.latency["ttft"].bounds) + 1)
    assert during.live_requests == 1
    assert during.totals.ended == {"finished": {"length": 1}}
    assert after.totals.ended == {"finished": {"length": 1}, "cancelled": {"request_cancelled": 1}}
    assert after.totals.prompt_tokens == 8
    assert (after.totals.handoffs, after.totals.remote_prefills, after.totals.local_prefills) == (2, 2, 0)
    assert after.totals.output_tokens >= 8
    counts = {name: sum(latency.counts) for name, latency in after.latency.items()}
    assert counts == {"ttft": 2, "tpot": 2, "handoff": 2, "queue": 2, "e2e": 1}
    assert after.latency["handoff"].total_s == pytest.approx(0.006)
    assert after.requests == LiveStates()
    assert before.uptime_s < during.uptime_s <= after.uptime_s < 60.0


async def test_it_names_no_address_whatever_workers_say() -> None:
    async with serving(breaker_failures=1, max_attempts=1) as (service, fleet):
        prefill, _ = await pair(service, fleet)
        prefill.refuse = EngineFailure("no way to tcp://10.1.2.3:4567 from 10.1.2.4")
        with pytest.raises(AttemptsExhausted):
            await whole(stream(service))
        (alert,) = told(service).alerts
        assert (alert.kind, alert.worker) == ("breaker", "p0")
        assert "its breaker is open: no way to [address] from [address]" in alert.text
        assert "10.1.2" not in str(service.cluster())


def seen(**changes: object) -> WorkerOverview:
    overview = worker_overview(worker("d0", "decode"), BreakerView(), 1.0)
    return msgspec.structs.replace(overview, **changes)


def test_alerts_name_what_is_wrong_and_nothing_else() -> None:
    assert alerts_of([seen()], None) == ()
    assert alerts_of([seen(state="draining")], None) == ()
    lost = worker_overview(
        worker("p0", "prefill", lost="no heartbeat for 3.0 s"), BreakerView(BreakerState.OPEN, "x"), 1.0
    )
    found = alerts_of([lost, seen(leaked_blocks=4)], "no prefill worker is available")
    assert found == (
        Alert(kind="unready", worker=None, text="no new request can be served: no prefill worker is available"),
        Alert(kind="lost", worker="p0", text="p0 is lost: no heartbeat for 3.0 s"),
        Alert(kind="leak", worker="d0", text="d0 has 4 leaked blocks"),
    )


def test_a_worker_is_told_as_it_is() -> None:
    shipped = Observations(BYTES)
    for size in (1000.0, 500.0):
        shipped.add(size)
    transfer = TransferCounts(
        opened=9,
        ended={"settled": 6, "lost": 1},
        open=2,
        draining=1,
        paths={"tcp": PathCounts(ship_bytes=shipped.histogram())},
    )
    overview = worker_overview(worker("p0", "prefill", transfer=transfer, waiting=3), BreakerView(), 1.5)
    assert (overview.name, overview.role, overview.state, overview.last_seen_s) == ("p0", "prefill", "live", 1.5)
    assert overview.handoffs == Handoffs(
        opened=9,
        open=2,
        draining=1,
        ended={"settled": 6, "lost": 1},
        transports={"tcp": TransportUse(ships=2, kv_bytes=1500)},
    )
    assert overview.load == heartbeat("prefill", waiting=3).load
    assert overview.load.pool == pool()


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((0, 0, 0), 0.5, None),
        ((4, 0, 0), 0.5, 0.5),
        ((0, 4, 0), 0.25, 1.5),
        ((2, 2, 0), 0.5, 1.0),
        ((1, 0, 3), 0.9, 3.0),
        ((0, 0, 1), 0.5, 3.0),
        ((1, 1, 0), 1.0, 3.0),
    ],
)
def test_quantiles_are_those_of_prometheus(counts: tuple[int, ...], share: float, expected: float | None) -> None:
    assert Latency(bounds=(1.0, 3.0), counts=counts, total_s=0.0).quantile(share) == expected
