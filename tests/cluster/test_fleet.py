"""What is done to a cluster that is up and under load, with real Ray: no request fails."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from living import runs
from typer.testing import CliRunner

from cluster.autoscale.autoscaler import request, withdraw
from cluster.bring_up import down, up
from cluster.cli import app
from cluster.config import ClusterConfig, EngineSection, RaySection, RoleSection, RouterSection, ScaleSection
from cluster.config_file import parse_config
from cluster.fleet_command import counts
from cluster.operations import operator
from cluster.renewal import check_standing
from cluster.state import ClusterState, StateStore
from cluster.status import ActorReport, cluster_report
from cluster.supervisor import SupervisorReport
from protocol.codec import SPOKEN
from protocol.errors import ConfigError, VersionMismatch
from protocol.versions import Versions
from router.client import Client

NAME = "fleet"
CLIENTS = 3
PROMPT = "ferry across the water"
LIMITS = {"worker_timeout": 20.0, "step_age_bound": 60.0}
"""A busy machine is not to look like a worker that died."""


class Fleet:
    """One cluster, and clients that ask it without a pause."""

    def __init__(self, state: ClusterState, store: StateStore, config: ClusterConfig) -> None:
        self.state, self.store, self.config = state, store, config
        self.served = [0] * CLIENTS
        self.failed: list[BaseException] = []
        self._over = threading.Event()

    def command(self, *words: str, status: int = 0) -> str:
        """The ``kvferry`` command; what it prints."""
        done = CliRunner().invoke(app, [*words], catch_exceptions=False)
        assert done.exit_code == status, done.output
        return done.stdout

    def actors(self) -> dict[str, ActorReport]:
        return {actor.status.name: actor for actor in cluster_report(NAME, store=self.store).actors}

    def lives(self) -> dict[str, int]:
        return {name: actor.status.incarnation for name, actor in self.actors().items()}

    def pids(self) -> set[int]:
        return {self.supervisor().pid, *(actor.status.pid for actor in self.actors().values())}

    def leaks(self) -> int:
        return sum(actor.load.pool.leaked for actor in self.actors().values() if actor.load is not None)

    def supervisor(self) -> SupervisorReport:
        with operator(NAME, self.store) as (asked, _, _):
            return asked.report()

    @contextmanager
    def load(self) -> Iterator[None]:
        """Clients ask all the while, and each once more than before at the end; none may fail.

        One keeps its connection, one makes a connection for each request, and one reads streams.
        """
        threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(CLIENTS)]
        self._over.clear()
        for thread in threads:
            thread.start()
        try:
            self.serves()
            yield
            self.serves()
        finally:
            self._over.set()
            for thread in threads:
                thread.join()
        assert not self.failed

    def serves(self) -> None:
        """Wait until every client got an answer from now on."""
        before = list(self.served)
        until(lambda: bool(self.failed) or all(now > then for now, then in zip(self.served, before, strict=True)))

    def _ask(self, index: int) -> None:
        ways: tuple[Callable[[Client, str], None], ...] = (complete, complete_anew, stream)
        try:
            with Client(self.state.url, model="tiny", retries=0) as client:
                while not self._over.is_set():
                    ways[index](client, f"{PROMPT} {index}")
                    self.served[index] += 1
        except BaseException as error:
            self.failed.append(error)


def complete(client: Client, prompt: str) -> None:
    answer = client.complete(prompt, max_tokens=24, temperature=0, ignore_eos=True)
    assert answer.usage.completion_tokens == 24


def complete_anew(client: Client, prompt: str) -> None:
    with Client(client.base_url, model="tiny", retries=0) as other:
        complete(other, prompt)


def stream(client: Client, prompt: str) -> None:
    with client.stream(prompt, max_tokens=120, temperature=0, ignore_eos=True) as chunks:
        answer = chunks.read()
    assert answer.usage.completion_tokens == 120


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    pause = threading.Event()
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError("the condition never came true")


@pytest.fixture(scope="module")
def fleet(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("state")
    store = StateStore(folder)
    config = ClusterConfig(
        name=NAME,
        model=str(tiny_llama_dir),
        served_name="tiny",
        engine=EngineSection(dtype="float32", num_blocks=64, block_size=8),
        router=RouterSection(port=0, limits=LIMITS),
        scale=ScaleSection(drain_timeout=30.0),
        ray=RaySection(cpus=2, start_timeout=300.0),
    )
    handler = signal.getsignal(signal.SIGTERM)
    state = up(config, store=store)
    assert signal.getsignal(signal.SIGTERM) is handler, "the workers take theirs, not who places them"
    before = os.environ.get("KVFERRY_STATE_DIR")
    os.environ["KVFERRY_STATE_DIR"] = str(folder)
    try:
        yield Fleet(state, store, config)
    finally:
        if before is None:
            del os.environ["KVFERRY_STATE_DIR"]
        else:
            os.environ["KVFERRY_STATE_DIR"] = before
        down(NAME, store=store)
    assert store.names() == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
class TestUnderLoad:
    """In this order: each leaves the cluster as the next one takes it."""

    def test_a_restart_replaces_every_process(self, fleet: Fleet, tmp_path: Path) -> None:
        file = tmp_path / "new.yaml"
        limits = LIMITS | {"max_attempts": 3}
        file.write_text(
            f"model: {fleet.config.model}\nname: {NAME}\nserved_name: tiny\nrouter: {{port: 0, limits: {limits}}}\n"
            "engine: {dtype: float32, num_blocks: 96, block_size: 8}\nray: {cpus: 2, start_timeout: 300}\n"
        )
        before = fleet.pids()
        with fleet.load():
            fleet.command("restart", str(file))
        assert sorted(fleet.lives()) == ["decode-1", "prefill-1", "router-1"]
        assert not before & fleet.pids()
        assert not any(runs(pid) for pid in before)
        assert fleet.store.load(NAME).url == fleet.state.url
        loads = [actor.load for actor in fleet.actors().values() if actor.load is not None]
        assert [load.pool.total for load in loads] == [96, 96]

    def test_more_workers_come_and_one_leaves(self, fleet: Fleet) -> None:
        with fleet.load():
            fleet.command("scale", "decode=2")
            assert sorted(fleet.lives()) == ["decode-0", "decode-1", "prefill-1", "router-1"]
            assert not any(actor.status.restarted for actor in fleet.actors().values()), "all of them are new"
            pid = fleet.actors()["decode-1"].status.pid
            os.kill(pid, signal.SIGTERM)
            until(lambda: not runs(pid))
            until(lambda: fleet.supervisor().settled)
            assert fleet.lives()["decode-1"] > 1, "it was told to end, not that there shall be one less"
            assert fleet.actors()["decode-1"].status.restarted
            self._changes_its_role(fleet)
            fleet.command("drain", "decode-1")
        assert sorted(fleet.lives()) == ["decode-0", "prefill-1", "router-1"]
        assert fleet.supervisor().wanted == {"router": 1, "prefill": 1, "decode": 1}

    @staticmethod
    def _changes_its_role(fleet: Fleet) -> None:
        before = fleet.actors()["decode-1"].status
        said = fleet.command("role", "decode-1", "prefill")
        after = fleet.actors()["decode-1"]
        assert said == f"cluster '{NAME}': 2 prefill, 1 decode workers\n"
        assert (after.status.role, after.status.pid) == ("prefill", before.pid), "the process stays"
        assert after.status.incarnation > before.incarnation
        assert [phase.name for phase in after.status.phases] == ["change", "imports", "warm-up", "sockets"], (
            "no weights"
        )
        until(lambda: (load := fleet.actors()["decode-1"].load) is not None and load.prefill_tokens > 0)
        assert fleet.leaks() == 0

    def test_a_supervisor_that_dies_goes_on_where_it_was(self, fleet: Fleet) -> None:
        before, lives = fleet.supervisor(), fleet.lives()
        with fleet.load():
            os.kill(before.pid, signal.SIGKILL)
            until(lambda: fleet.supervisor().pid != before.pid and fleet.supervisor().settled)
        after = fleet.supervisor()
        assert (after.wanted, after.members) == (before.wanted, before.members)
        assert fleet.lives() == lives
        assert cluster_report(NAME, store=fleet.store).state == "ready"

    def test_what_each_process_logs_can_be_read(self, fleet: Fleet) -> None:
        assert "serves tiny" in fleet.command("logs", "router-1")
        assert len(fleet.command("logs", "router-1", "--lines", "1").splitlines()) == 1
        fleet.command("logs", "supervisor")

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("drain", "decode-0"), "only decode worker"),
            (("drain", "decode-7"), "no worker 'decode-7'"),
            (("role", "prefill-1", "decode"), "only prefill worker"),
            (("role", "prefill-1", "router"), "role must be one of"),
            (("scale", "router=2"), "role must be one of"),
            (("logs", "nobody"), "no process 'nobody'"),
        ],
    )
    def test_what_cannot_be_is_said(self, fleet: Fleet, words: tuple[str, ...], said: str) -> None:
        lives = fleet.lives()
        done = CliRunner().invoke(app, [*words])
        assert said in str(done.exception)
        assert fleet.supervisor().settled
        assert fleet.lives() == lives

    def test_a_restart_cannot_change_what_stands(self, fleet: Fleet, tmp_path: Path) -> None:
        file = tmp_path / "other.yaml"
        file.write_text(f"model: {fleet.config.model}\nname: {NAME}\nrouter: {{port: 1234}}\n")
        done = CliRunner().invoke(app, ["restart", str(file)])
        assert isinstance(done.exception, ConfigError)
        assert done.exception.field == "served_name"

    def test_a_release_that_its_router_does_not_know_replaces_nobody(self, fleet: Fleet) -> None:
        lives, state = fleet.lives(), fleet.store.load(NAME)
        assert state.wire == SPOKEN
        fleet.store.save(msgspec.structs.replace(state, wire=Versions(1, 2)))
        try:
            done = CliRunner().invoke(app, ["restart"])
        finally:
            fleet.store.save(state)
        assert isinstance(done.exception, VersionMismatch)
        assert "speaks wire version 1 to 2" in str(done.exception)
        assert fleet.lives() == lives

    def test_workers_come_and_go_by_load_within_their_bounds(self, fleet: Fleet, tmp_path: Path) -> None:
        """Bounds decide here, so that nothing hangs on how fast this machine is."""
        file = tmp_path / "auto.yaml"

        def auto(enabled: str, least: int, most: int) -> None:
            file.write_text(
                f"model: {fleet.config.model}\nname: {NAME}\nscale: {{drain_timeout: 30.0, auto: {{enabled: {enabled}, "
                f"ttft: 3000, tpot: 3000, interval: 0.2, window: 0.5, cooldown: 0.5, down_after: 0.5, "
                f"decode: {{min: {least}, max: {most}}}}}}}\n"
            )

        auto("true", 2, 2)
        with fleet.load():
            tried = fleet.command("autoscale", str(file), "--dry-run", "--seconds", "0.5")
            assert "kvferry scale decode=2: decode: 2 needed, 1 there" in tried
            assert not fleet.supervisor().wanted["decode"] > 1, "nothing is done"
            fleet.command("autoscale", str(file))
            until(lambda: fleet.supervisor().wanted["decode"] == 2 and fleet.supervisor().settled)
            auto("true", 1, 1)
            fleet.command("autoscale", str(file))
            until(lambda: fleet.supervisor().wanted["decode"] == 1 and fleet.supervisor().settled)
            told = fleet.command("autoscale")
            assert "kvferry drain decode-" in told
            auto("false", 1, 1)
            assert "by command only" in fleet.command("autoscale", str(file))
        assert fleet.leaks() == 0

    def test_ray_is_asked_for_machines(self, fleet: Fleet) -> None:
        elsewhere = msgspec.structs.replace(
            fleet.config, prefill=RoleSection(cpus=1.0, resources={"rdma": 1.0}), ray=RaySection(address="auto")
        )
        with operator(NAME, fleet.store):
            assert request(elsewhere, {"prefill": 2, "decode": 1}) == ""
            withdraw(elsewhere)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("router: {port: 8001}", "router.port"),
        ("router: {hub_port: 7000}", "router.hub_port"),
        ("router: {host: 127.0.0.2}", "router.host"),
        ("router: {tls_certificate: a.pem, tls_key: b.pem}", "router.tls_certificate"),
        ("ray: {cpus: 3}", "ray"),
        ("name: other", "name"),
        ("router: {limits: {max_requests: 9}, api_keys: keys.yaml}\nengine: {num_blocks: 9}", None),
    ],
)
def test_a_restart_takes_all_but_what_others_were_told(text: str, field: str | None) -> None:
    present = parse_config("model: m")
    if field is None:
        check_standing(parse_config(f"model: m\n{text}"), present)
        return
    with pytest.raises(ConfigError, match="cannot change in a cluster that is up") as caught:
        check_standing(parse_config(f"model: m\n{text}"), present)
    assert caught.value.field == field


@pytest.mark.parametrize("word", ["prefill", "prefill=", "prefill=x", "prefill=-1", "prefill=1e3"])
def test_a_number_of_workers_is_a_number(word: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        counts([word])


def test_each_role_is_named_once() -> None:
    assert counts(["prefill=4", "decode=2"]) == {"prefill": 4, "decode": 2}
    with pytest.raises(ConfigError, match="twice"):
        counts(["prefill=4", "prefill=2"])


def test_an_order_with_the_secret_does_not_show_it() -> None:
    from cluster.supervisor import SupervisorOrder

    order = SupervisorOrder(
        name="x", config=ClusterConfig(model="m"), port=1, routers=("tcp://127.0.0.1:2",), secret="hush"
    )
    assert "hush" not in repr(order)
    assert msgspec.json.decode(msgspec.json.encode(order), type=SupervisorOrder) == order
