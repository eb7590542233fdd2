"""What the planner decides, by itself: needs, bounds, patience, and what it is told."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.autoscale.figures import RouterFigures, WorkerFigures, figures_of
from cluster.autoscale.need import needed
from cluster.autoscale.observer import Load, Observer, RoleLoad, Seen, Turned
from cluster.autoscale.planner import ROLES, Action, Grow, Leave, Plan, Planner, Provide, Staying, Switch
from cluster.config_file import parse_config
from cluster.scale_section import AutoSection, RoleBounds, ScaleSection
from cluster.sizing.queue import wait
from protocol.errors import ConfigError
from protocol.ids import Role
from protocol.messages import PoolCounts, WorkerLoad
from router.client import ClusterOverview
from router.overview import Unserved

AUTO = AutoSection(
    enabled=True,
    ttft=1.0,
    tpot=0.1,
    percentile=0.9,
    prefill=RoleBounds(min=1, max=6),
    decode=RoleBounds(min=1, max=6),
    down_after=300.0,
    cooldown=60.0,
)
POOL = PoolCounts(free=0, active=0, cached=0, exported=0, importing=0, draining=0, reserved=1, total=1)


def load(prefill: float = 0.0, decode: float = 0.0, **changed: object) -> Load:
    """As much as keeps so many workers busy: prefill ones in steps, decode ones with full batches."""
    tokens = 1000.0 * prefill
    batch = 41.0
    given = {
        "requests": tokens / 200.0,
        "ttft_met": 1.0,
        "tpot_met": 1.0,
        "prefill": RoleLoad(workers=1, busy=prefill, tokens=tokens, fixed=0.0, per_token=1e-3),
        "decode": RoleLoad(
            workers=1,
            tokens=decode * batch / 0.091,
            sequences=decode * batch,
            fixed=0.05,
            per_token=1e-3,
            capacity=1e6,
            context=500.0,
        ),
        **changed,
    }
    return Load(**given)  # type: ignore[arg-type]


class Watched:
    """A planner, and a cluster that does at once what it says."""

    def __init__(self, auto: AutoSection = AUTO, *, prefill: int = 1, decode: int = 1) -> None:
        self.auto, self.now = auto, 1000.0
        self.planner = Planner(auto)
        self.roles: dict[str, Role] = {f"prefill-{index}": "prefill" for index in range(prefill)}
        self.roles |= {f"decode-{index}": "decode" for index in range(decode)}
        self.made = 0
        self.plan = Plan(workers={}, needs={})

    def counts(self) -> tuple[int, int]:
        roles = [*self.roles.values()]
        return roles.count("prefill"), roles.count("decode")

    def turn(self, seen: Load, seconds: float | None = None, *, ready: bool = True) -> list[Action]:
        """One decision, without what is asked of Ray."""
        self.now += self.auto.interval if seconds is None else seconds
        staying = [Staying(name, role, ready) for name, role in self.roles.items()]
        self.plan = self.planner.plan(staying, Seen(seen, seen), self.now)
        for action in self.plan.actions:
            match action:
                case Switch(worker, role, _):
                    assert self.roles[worker] != role
                    self.roles[worker] = role
                case Grow(role, workers, _):
                    for _ in range(workers - [*self.roles.values()].count(role)):
                        self.made += 1
                        self.roles[f"new-{self.made}"] = role
                case Leave(worker, role, _):
                    assert self.roles.pop(worker) == role
                case Provide(prefill, decode, _):
                    wanted = prefill, decode
        if any(isinstance(action, Provide) for action in self.plan.actions):
            assert wanted == self.counts(), "machines for those that there shall be"
        return [action for action in self.plan.actions if not isinstance(action, Provide)]

    def pass_time(self, seen: Load, seconds: float) -> list[Action]:
        actions = []
        for _ in range(int(seconds / self.auto.interval)):
            actions += self.turn(seen)
        return actions


def test_prefill_workers_are_as_many_as_keep_the_queue_within_the_target() -> None:
    for busy in (0.3, 0.9, 2.5, 4.2):
        found = needed("prefill", load(busy), AUTO)
        service, rate = 0.2, 5.0 * busy
        assert service + wait(found.workers, rate, service, 0.9) <= 1.0
        assert found.workers == 1 or service + wait(found.workers - 1, rate, service, 0.9) > 1.0
        assert "1,000 a worker" in found.why
    assert needed("prefill", load(), AUTO).workers == 1


def test_prompts_that_wait_are_worked_off_within_the_target() -> None:
    seen = load(0.5)
    waiting = replace(seen, prefill=replace(seen.prefill, waiting_tokens=3000))
    found = needed("prefill", waiting, AUTO)
    assert found.workers == 4
    assert "3,000 tokens wait" in found.why


def test_what_the_router_holds_or_refuses_asks_for_prefill_while_decode_has_room() -> None:
    seen = load(0.5, 0.5)
    assert needed("prefill", seen, AUTO).workers == 1
    held = replace(seen, turned=Turned(waiting=15, waiting_tokens=3000))
    found = needed("prefill", held, AUTO)
    assert found.workers == 4
    assert "15 requests wait in the router" in found.why
    assert needed("decode", held, AUTO) == needed("decode", seen, AUTO), "that has room for more"
    cached = replace(held, prefill=replace(held.prefill, uncached=0.1))
    assert needed("prefill", cached, AUTO).workers < 4, "most of what waits is in the caches"
    refused = replace(seen, turned=Turned(refused=10.0, refused_tokens=2000.0))
    found = needed("prefill", refused, AUTO)
    assert found.workers == needed("prefill", load(2.5, 0.5), AUTO).workers > 2
    assert "10 a second are refused" in found.why
    growing = replace(seen, turned=Turned(growth=2000.0))
    assert needed("prefill", growing, AUTO).workers > 2
    silent = replace(load(), turned=Turned(waiting=3, waiting_tokens=600))
    assert needed("prefill", silent, AUTO).workers == 1


def test_it_asks_for_decode_when_that_has_no_room() -> None:
    full = load(0.3, 1.0)
    alone = needed("decode", full, AUTO).workers
    held = replace(full, turned=Turned(waiting=82, waiting_tokens=16400, refused=3.0, refused_tokens=600.0))
    assert needed("decode", held, AUTO).workers >= alone + 2 * 2
    assert needed("prefill", held, AUTO) == needed("prefill", full, AUTO), "its workers have little to do"
    both = replace(held, prefill=replace(held.prefill, busy=0.9))
    assert needed("prefill", both, AUTO).workers > needed("prefill", full, AUTO).workers
    few = replace(full, decode=replace(full.decode, sequences=8.0, tokens=50.0, most=8.0))
    assert "8 are stepped side by side at most" in needed("decode", few, AUTO).why
    held = replace(few, turned=Turned(waiting=24, waiting_tokens=100))
    assert needed("decode", held, AUTO).workers >= 4


def test_prompts_longer_than_the_target_do_not_ask_for_endless_workers() -> None:
    seen = load(2.0, requests=1.0)
    found = needed("prefill", seen, AUTO)
    assert found.workers == 3
    assert "longer than 1 s" in found.why


def test_decode_workers_are_as_many_as_keep_a_step_within_the_target() -> None:
    for busy in (0.5, 1.5, 3.0):
        seen = load(decode=busy)
        found = needed("decode", seen, AUTO).workers
        per_worker = seen.decode.sequences / found
        assert seen.decode.fixed + per_worker * seen.decode.per_token <= AUTO.tpot
        assert found <= busy + 1
    crowded = load(decode=1.0)
    crowded = replace(crowded, decode=replace(crowded.decode, sequences=200))
    assert needed("decode", crowded, AUTO).workers == 5, "those that wait want a step too"
    full = replace(crowded, decode=replace(crowded.decode, sequences=40, capacity=5000.0))
    found = needed("decode", full, AUTO)
    assert found.workers == 6
    assert "10 of 500 tokens fit a pool" in found.why


def test_more_come_at_once_and_fewer_only_after_long_quiet() -> None:
    watched = Watched()
    watched.turn(load(0.3, 0.3))
    (grown,) = watched.turn(load(3.0, 0.3))
    assert isinstance(grown, Grow)
    assert watched.counts()[0] == grown.workers > 3
    assert watched.pass_time(load(0.3, 0.3), 290.0) == []
    gone = watched.pass_time(load(0.3, 0.3), 30.0)
    assert {type(each) for each in gone} == {Leave}
    assert watched.counts() == (1, 1)


def test_a_burst_that_comes_again_finds_what_the_last_one_left() -> None:
    watched = Watched()
    for _ in range(5):
        watched.pass_time(load(3.0, 0.5), 60.0)
        watched.pass_time(load(0.3, 0.5), 200.0)
    assert watched.made == watched.counts()[0] - 1, "made once, and kept"


def test_noise_about_a_border_changes_nothing_twice() -> None:
    watched = Watched()
    changes = []
    for turn in range(400):
        changes += watched.turn(load(0.85 + 0.3 * (turn % 2), 0.9))
    assert len(changes) <= 2
    assert {type(each) for each in changes} == {Grow}


def test_a_worker_that_is_not_needed_changes_its_role_before_another_is_made() -> None:
    watched = Watched(prefill=2, decode=4)
    watched.pass_time(load(0.5, 0.5), 70.0)
    actions = watched.turn(load(3.5, 0.5))
    assert {type(each) for each in actions} == {Switch}
    assert watched.counts()[0] == watched.plan.needs["prefill"].workers > 3
    assert {type(each) for each in watched.turn(load(9.0, 0.5))} == {Switch, Grow}, "then what is still missing"
    assert watched.counts() == (6, 1)


def test_nobody_is_taken_from_a_role_that_needed_it_a_moment_ago() -> None:
    watched = Watched(prefill=2, decode=4)
    watched.pass_time(load(0.5, 2.9), 70.0)
    actions = watched.turn(load(3.5, 0.2))
    assert {type(each) for each in actions} == {Grow}
    assert watched.counts()[1] == 4


def test_nobody_is_taken_from_a_role_that_lacks_some_itself() -> None:
    watched = Watched(prefill=3, decode=1)
    watched.pass_time(load(0.3, 0.3), 70.0)
    kinds = {type(each) for each in watched.turn(load(5.0, 3.5))}
    assert kinds == {Grow}


def test_where_ray_sets_different_things_aside_no_role_is_changed() -> None:
    watched = Watched(prefill=1, decode=4)
    watched.planner = Planner(AUTO, exchangeable=False)
    watched.pass_time(load(0.5, 0.5), 70.0)
    assert {type(each) for each in watched.turn(load(2.0, 0.5))} == {Grow}


def test_nobody_leaves_while_targets_are_missed_or_somebody_is_on_the_way() -> None:
    watched = Watched(prefill=3)
    watched.pass_time(load(0.3, 0.3, ttft_met=0.5), 400.0)
    assert watched.counts() == (3, 1)
    assert watched.plan.held == "fewer would do, but targets are missed"
    watched.turn(load(0.3, 0.3, turned=Turned(refused=0.5)))
    assert watched.counts() == (3, 1)
    assert watched.plan.held == "fewer would do, but requests are refused"
    watched.turn(load(0.3, 0.3), ready=False)
    assert watched.counts() == (3, 1)
    assert watched.plan.held == "fewer would do, but some are on their way"
    watched.turn(load(0.3, 0.3))
    assert watched.counts() == (1, 1)


def test_the_least_busy_leave() -> None:
    planner = Planner(AUTO)
    staying = [Staying("prefill-0", "prefill", True, 3.0), Staying("prefill-1", "prefill", True, 9.0)]
    staying += [Staying("prefill-2", "prefill", True, 5.0), Staying("decode-0", "decode", True)]
    for now in range(0, 301, 5):
        plan = planner.plan(staying, Seen(load(0.3, 0.3), load(0.3, 0.3)), float(now))
    assert [each.worker for each in plan.actions if isinstance(each, Leave)] == ["prefill-0", "prefill-2"]


def test_what_would_be_right_beyond_the_bounds_is_said() -> None:
    auto = msgspec.structs.replace(AUTO, max_workers=4)
    watched = Watched(auto)
    watched.turn(load(5.0, 5.0))
    assert sum(watched.counts()) == 4
    assert "max_workers is 4" in watched.plan.held
    watched = Watched(msgspec.structs.replace(AUTO, prefill=RoleBounds(min=2, max=3)))
    watched.turn(load(9.0))
    assert watched.counts() == (3, 1)
    assert "3 is the most" in watched.plan.needs["prefill"].why


def test_bounds_that_change_are_kept_at_once() -> None:
    watched = Watched(msgspec.structs.replace(AUTO, prefill=RoleBounds(min=1, max=2)), prefill=4)
    (first, second) = watched.turn(load(3.0, 0.5))
    assert isinstance(first, Leave)
    assert isinstance(second, Leave)
    assert "2 is the most" in first.why
    watched = Watched(msgspec.structs.replace(AUTO, decode=RoleBounds(min=3, max=4)))
    watched.turn(load(0.1, 0.1))
    assert watched.counts() == (1, 3)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_whatever_comes_there_are_as_many_as_there_may_be(data: st.DataObject) -> None:
    least, most = data.draw(st.integers(1, 2)), data.draw(st.integers(2, 5))
    bounds = RoleBounds(min=least, max=most)
    auto = msgspec.structs.replace(
        AUTO, prefill=bounds, decode=bounds, max_workers=data.draw(st.none() | st.integers(2 * least, 10))
    )
    watched = Watched(auto, prefill=least, decode=least)
    for _ in range(data.draw(st.integers(1, 30))):
        seen = load(data.draw(st.floats(0, 8)), data.draw(st.floats(0, 8)), ttft_met=data.draw(st.floats(0, 1)))
        watched.turn(seen, data.draw(st.sampled_from([5.0, 30.0, 400.0])), ready=data.draw(st.booleans()))
        assert all(least <= count <= most for count in watched.counts())
        assert sum(watched.counts()) <= (auto.max_workers or 2 * most)
        assert all(each.why for each in watched.plan.actions)


# --- what it is told --------------------------------------------------------------------------------------------------


def worker(name: str, incarnation: int, role: Role, **counted: object) -> WorkerFigures:
    told = WorkerLoad(**{"pool": POOL, **counted})  # type: ignore[arg-type]
    return WorkerFigures(name=name, incarnation=incarnation, role=role, block_size=16, load=told)


def figures(*workers: WorkerFigures, firsts: float = 0.0, met: float = 0.0) -> RouterFigures:
    return RouterFigures(firsts=firsts, firsts_met=met, answers=0.0, answers_met=0.0, workers=workers)


def test_rates_are_of_the_last_seconds_and_of_each_life_by_itself() -> None:
    observer = Observer(10.0, 20.0)
    assert observer.take(figures(worker("a", 1, "prefill", prefill_tokens=1000, step_seconds=50.0)), 100.0) is None
    first = observer.take(
        figures(
            worker("a", 1, "prefill", prefill_tokens=3000, step_seconds=55.0, waiting_tokens=400),
            worker("b", 4, "prefill", prefill_tokens=500, step_seconds=1.0),
            worker("c", 2, "decode", decode_tokens=70, running=3, waiting=1),
            firsts=20.0,
            met=15.0,
        ),
        110.0,
    )
    assert first is not None
    seen = first.lately
    assert (seen.requests, seen.ttft_met, seen.tpot_met) == (2.0, 0.75, 1.0)
    assert (seen.prefill.tokens, seen.prefill.busy, seen.prefill.growth) == (250.0, 0.6, 40.0)
    assert seen.prefill.waiting_tokens == 0, "it has come since"
    assert (seen.decode.tokens, seen.decode.sequences) == (7.0, 4)
    later = observer.take(figures(worker("a", 5, "decode", decode_tokens=10), firsts=40.0, met=35.0), 120.0)
    assert later is not None
    assert (later.lately.ttft_met, later.lately.decode.tokens, later.lately.prefill.workers) == (1.0, 1.0, 0)
    assert (later.steadily.ttft_met, later.steadily.requests, later.steadily.decode.sequences) == (0.875, 2.0, 2.0)
    assert observer.take(figures(firsts=1.0), 130.0) is None, "the router has started again"


def test_what_waits_in_the_router_is_what_waited_at_every_look() -> None:
    observer = Observer(10.0, 20.0)
    looks = ((0, 0, 0, 0), (8, 800, 3, 600), (5, 900, 4, 700))
    for second, (waiting, tokens, refused, of_them) in enumerate(looks):
        told = Unserved(waiting=waiting, waiting_tokens=tokens, refused=refused, refused_tokens=of_them)
        seen = observer.take(msgspec.structs.replace(figures(firsts=second), unserved=told), 10.0 * second)
    assert seen is not None
    assert seen.lately.turned == Turned(
        waiting=5, waiting_tokens=800, growth=10.0, refused=pytest.approx(0.1), refused_tokens=10.0
    )
    assert seen.lately.refused_share == 0.5
    assert seen.steadily.turned.waiting == 0, "it has come since"


def test_the_windows_share_of_a_bucket_is_what_lies_within_the_target() -> None:
    text = "".join(
        f'kvferry_{name}_seconds_bucket{{le="{bound}"}} {count}\n'
        for name, buckets in (("ttft", ((0.5, 10), (1.0, 30), ("+Inf", 40))), ("tpot", ((0.1, 5), ("+Inf", 5))))
        for bound, count in buckets
    )
    text = "# TYPE kvferry_ttft_seconds histogram\n" + text.replace(
        "kvferry_tpot", "# TYPE kvferry_tpot_seconds histogram\nkvferry_tpot", 1
    )
    nobody = ClusterOverview(model="m", router="r", policy="cost", live_requests=0, workers=())
    found = figures_of(nobody, text, ttft=0.75, tpot=0.1)
    assert (found.firsts, found.firsts_met, found.answers, found.answers_met) == (40, 20, 5, 5)
    assert figures_of(nobody, text, ttft=9.0, tpot=0.05).firsts_met == 30, "what is beyond all bounds is not known"
    assert figures_of(nobody, "", ttft=1.0, tpot=1.0).firsts == 0


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("prefill: {min: 0}", "scale.auto.prefill.min", "in \\[1, 1024\\], got 0"),
        ("prefill: {min: 4, max: 2}", "scale.auto.prefill.max", "min is 4"),
        ("percentile: 1.0", "scale.auto.percentile", "got 1.0"),
        ("window: 1.0", "scale.auto.window", "interval is 5"),
        ("down_after: 1.0", "scale.auto.down_after", "window is 15"),
        ("max_workers: 1", "scale.auto.max_workers", "at least 2"),
        ("mix: 1", "scale.auto.mix", "did you mean 'max_workers'|known keys"),
    ],
)
def test_a_section_that_cannot_be_is_named(text: str, field: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_config(f"model: m\nscale:\n  auto: {{{text}}}\n")
    assert caught.value.field == field


def test_nothing_comes_by_load_that_was_not_asked_for() -> None:
    assert not ScaleSection().auto.enabled
    assert parse_config("model: m\nscale: {auto: {enabled: true, decode: {max: 9}}}").scale.auto.decode.max == 9
    assert ROLES == ("prefill", "decode")
