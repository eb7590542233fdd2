from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from worker_facts import MODEL, heartbeat

from protocol.ids import Peer
from router.placer import Placer, PlacerConfig
from router.policy import Demand
from router.prompt_chain import PromptChains
from router.registry import WorkerRegistry

EVENTS = st.tuples(st.sampled_from(["beat", "unheard", "restart", "end", "unreachable", "pass"]), st.integers(0, 4))


@given(st.lists(EVENTS, max_size=40))
def test_the_placer_knows_every_worker_as_the_registry_does(events: list[tuple[str, int]]) -> None:
    """Whatever came, and whether it was told of each heartbeat or not, at the next decision."""
    registry = WorkerRegistry(2.0, 10.0, 5.0)
    placer = Placer(PlacerConfig(MODEL, "cost"), registry)
    demand, lives, now = Demand(needs_decode=True), [1] * 5, 0.0
    for number, role in enumerate(("prefill", "decode")):
        peer = Peer(f"w{number}", 1)
        registry.heartbeat(peer, str(peer).encode(), heartbeat(role), now)  # type: ignore[arg-type]
    for kind, number in events:
        now += 0.1
        lives[number] += kind == "restart"
        peer = Peer(f"w{number}", lives[number])
        match kind:
            case "end":
                registry.disconnected(str(peer).encode(), now)
            case "unreachable":
                registry.unreachable(peer)
            case "pass":
                now += 1.5
                registry.tick(now)
            case _:
                beat = heartbeat("decode" if number % 2 else "prefill", running=int(10 * now))
                registry.heartbeat(peer, str(peer).encode(), beat, now)
                if kind == "beat":
                    placer.heartbeat(peer, 0, now)
        if not {"prefill", "decode"} - {each.profile.role for each in registry.workers() if each.accepts_work}:
            snapshot, _ = placer.look(PromptChains((1, 2, 3)), demand, now)
            seen = {each.peer.name: each for each in snapshot.fleet.workers if each is not None}
            assert seen == {each.peer.name: each for each in registry.workers()}
