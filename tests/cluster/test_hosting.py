from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from cluster.hosting import Host, HostState, StartProgress
from protocol.errors import ConfigError, KVFerryError


class Scripted:
    """A service whose coming up, failing and ending the test decides."""

    def __init__(self, *, fails: BaseException | None = None, hangs: bool = False) -> None:
        self.calls: list[str] = []
        self._fails, self._hangs = fails, hangs
        self.crash: asyncio.Future[None] | None = None

    async def start(self, progress: StartProgress | None = None) -> None:
        self.calls.append("start")
        self.crash = asyncio.get_running_loop().create_future()
        assert progress is not None
        progress("loading", 0.5)
        if self._hangs:
            await asyncio.Event().wait()
        if self._fails is not None:
            raise self._fails

    async def stop(self) -> None:
        self.calls.append("stop")

    async def wait(self) -> None:
        assert self.crash is not None
        await self.crash

    def drain(self, timeout: float) -> None:
        self.calls.append(f"drain {timeout:g}")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    made: list[Host] = []
    yield made
    for host in made:
        host.stop(5.0)
    # One that has left by itself tells of it before its thread ends.
    until(lambda: not any(thread.name == "hosted" for thread in threading.enumerate()))


def until(condition: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(6000):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("the condition never came true")


def test_a_service_comes_up_and_stops_with_nobody_calling_its_methods(hosts: list[Host]) -> None:
    service = Scripted()
    states: list[HostState] = []
    host = Host("hosted", lambda: service, on_up=lambda: states.append(host.state))
    hosts.append(host)
    host.begin()
    until(lambda: host.state is HostState.READY)
    assert (host.stage, host.fraction, host.error) == ("ready", 1.0, "")
    assert states == [HostState.STARTING]
    assert [phase.name for phase in host.phases] == ["thread", "imports", "loading"]
    host.stop(5.0)
    assert host.state is HostState.STOPPED
    assert service.calls == ["start", "stop"]


def test_a_service_that_does_not_come_up_says_why_and_can_still_be_stopped(hosts: list[Host]) -> None:
    host = Host("hosted", lambda: Scripted(fails=ConfigError("num_blocks must be 2, got 1")))
    hosts.append(host)
    host.begin()
    until(lambda: host.state is HostState.FAILED)
    assert host.error == "config_error: num_blocks must be 2, got 1"
    assert host.stage == "loading"
    host.stop(5.0)
    assert host.state is HostState.STOPPED


def test_a_service_that_cannot_be_made_says_why(hosts: list[Host]) -> None:
    def make() -> Scripted:
        raise OSError("no such model")

    host = Host("hosted", make)
    hosts.append(host)
    host.begin()
    until(lambda: host.state is HostState.FAILED)
    assert host.error == "OSError: no such model"


def test_a_service_that_drains_ends_in_good_order_when_it_has_finished(hosts: list[Host]) -> None:
    service, left = Scripted(), threading.Event()
    host = Host("hosted", lambda: service, on_left=left.set)
    hosts.append(host)
    host.begin()
    until(lambda: host.state is HostState.READY)
    host.drain(7.0)
    until(lambda: "drain 7" in service.calls)
    assert host.state is HostState.READY
    assert service.crash is not None
    service.crash.get_loop().call_soon_threadsafe(service.crash.set_result, None)
    assert left.wait(60.0)
    assert host.state is HostState.STOPPED
    assert service.calls == ["start", "drain 7", "stop"]


@pytest.mark.parametrize("fails", [None, OSError("no such model")])
def test_a_service_that_is_not_up_leaves_at_once(hosts: list[Host], fails: OSError | None) -> None:
    service, left = Scripted(fails=fails, hangs=fails is None), threading.Event()
    host = Host("hosted", lambda: service, on_left=left.set)
    hosts.append(host)
    host.begin()
    until(lambda: host.stage == "loading" and (fails is None or host.state is HostState.FAILED))
    host.drain(7.0)
    assert left.wait(60.0)
    assert service.calls == ["start", "stop"]


def test_another_service_comes_up_once_the_first_has_drained(hosts: list[Host]) -> None:
    first, second, left = Scripted(), Scripted(), threading.Event()
    host = Host("hosted", lambda: first, on_left=left.set)
    hosts.append(host)
    host.begin()
    until(lambda: host.state is HostState.READY)
    made: list[list[str]] = []

    def make() -> Scripted:
        made.append(list(first.calls))
        return second

    host.switch(make, 7.0)
    until(lambda: "drain 7" in first.calls)
    assert host.service is first, "it has not finished yet"
    assert first.crash is not None
    first.crash.get_loop().call_soon_threadsafe(first.crash.set_result, None)
    until(lambda: host.service is second and host.state is HostState.READY)
    assert made == [["start", "drain 7", "stop"]], "the first has given everything back by then"
    assert [phase.name for phase in host.phases] == ["change", "imports", "loading"]
    assert not left.is_set()
    host.drain(5.0)
    until(lambda: "drain 5" in second.calls)
    second.crash.get_loop().call_soon_threadsafe(second.crash.set_result, None)  # type: ignore[union-attr]
    assert left.wait(60.0)
    assert second.calls == ["start", "drain 5", "stop"]


def test_one_that_is_to_leave_has_no_successor(hosts: list[Host]) -> None:
    service, left = Scripted(), threading.Event()
    host = Host("hosted", lambda: service, on_left=left.set)
    hosts.append(host)
    host.begin()
    until(lambda: host.state is HostState.READY)
    host.switch(Scripted, 7.0)
    host.drain(5.0)
    until(lambda: "drain 5" in service.calls)
    assert service.crash is not None
    service.crash.get_loop().call_soon_threadsafe(service.crash.set_result, None)
    assert left.wait(60.0)
    assert (host.state, host.service) == (HostState.STOPPED, service)


def test_a_successor_that_does_not_come_up_says_why(hosts: list[Host]) -> None:
    first = Scripted()
    host = Host("hosted", lambda: first)
    hosts.append(host)
    host.begin()
    host.switch(lambda: Scripted(fails=ConfigError("num_blocks must be 2, got 1")), 7.0)  # while the first comes up
    until(lambda: "drain 7" in first.calls)
    assert first.crash is not None
    first.crash.get_loop().call_soon_threadsafe(first.crash.set_result, None)
    until(lambda: host.state is HostState.FAILED)
    assert host.error == "config_error: num_blocks must be 2, got 1"


def test_stop_while_coming_up_cancels_the_start(hosts: list[Host]) -> None:
    service = Scripted(hangs=True)
    host = Host("hosted", lambda: service)
    hosts.append(host)
    host.begin()
    until(lambda: host.stage == "loading")
    host.stop(5.0)
    assert host.state is HostState.STOPPED
    assert service.calls == ["start", "stop"]


def test_a_service_that_ends_by_itself_is_fatal_once(hosts: list[Host]) -> None:
    service, fatal = Scripted(), list[BaseException]()
    host = Host("hosted", lambda: service, on_fatal=fatal.append)
    hosts.append(host)
    host.begin()
    until(lambda: host.state is HostState.READY)

    async def crash() -> None:
        def fail(running: Scripted) -> None:
            assert running.crash is not None
            running.crash.set_exception(RuntimeError("the step loop broke"))

        await host.call(fail)

    asyncio.run(crash())
    until(lambda: bool(fatal))
    assert host.state is HostState.FAILED
    assert [str(error) for error in fatal] == ["the step loop broke"]


def test_calls_run_on_the_services_own_loop_and_only_while_it_is_ready(hosts: list[Host]) -> None:
    host = Host("hosted", Scripted)
    hosts.append(host)
    with pytest.raises(KVFerryError, match="starting"):
        asyncio.run(host.call(lambda service: service))
    host.begin()
    until(lambda: host.state is HostState.READY)
    assert asyncio.run(host.call(lambda _: threading.current_thread().name)) == "hosted"
    with pytest.raises(ZeroDivisionError):
        asyncio.run(host.call(lambda _: 1 // 0))
