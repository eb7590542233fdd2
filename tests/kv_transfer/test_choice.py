"""The choice between transports, without any."""

from __future__ import annotations

import logging

import pytest

from kv_transfer.choice import MODES, UNPINNED, Chooser, Receivers, listen
from kv_transfer.transport import TransportConfig, Window
from protocol.errors import ChannelLost, ConfigError, InvariantViolation, UnknownTransport

BOTH = ("tcp://h:1", "shm://x")
TCP = ("tcp://h:1",)


class Reach:
    """What can be reached, and how often that was asked."""

    def __init__(self, **reasons: str) -> None:
        self.reasons = reasons
        self.asked: list[str] = []

    def __call__(self, address: str) -> str | None:
        self.asked.append(address)
        return self.reasons.get(address.partition("://")[0])


@pytest.mark.parametrize(
    ("mode", "addresses", "reasons", "chosen", "fallbacks"),
    [
        ("auto", BOTH, {}, "shm://x", 0),
        ("auto", BOTH, {"shm": "far"}, "tcp://h:1", 1),
        ("auto", TCP, {"shm": "far"}, "tcp://h:1", 0),
        ("auto", (*TCP, "pigeon://roof"), {}, "tcp://h:1", 0),
        ("tcp", BOTH, {}, "tcp://h:1", 0),
        ("shm", BOTH, {}, "shm://x", 0),
    ],
)
def test_the_best_in_reach_is_taken(
    mode: str, addresses: tuple[str, ...], reasons: dict[str, str], chosen: str, fallbacks: int
) -> None:
    chooser = Chooser(mode, reach=Reach(**reasons))
    assert [chooser.choose(addresses) for _ in range(3)] == [chosen] * 3
    assert chooser.fallbacks == fallbacks


def test_a_choice_is_kept_until_it_failed_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    reach = Reach(shm="far")
    chooser = Chooser("auto", reach=reach)
    with caplog.at_level(logging.INFO, "kv_transfer.choice"):
        for _ in range(3):
            chooser.choose(BOTH)
            chooser.choose(BOTH)
            chooser.forget(BOTH)
    assert reach.asked == ["shm://x", "tcp://h:1"] * 3
    assert chooser.fallbacks == 1
    assert len(caplog.records) == 1
    reach.reasons.clear()
    assert chooser.choose(BOTH) == "shm://x"
    chooser.forget(("never://chosen",))


@pytest.mark.parametrize(
    ("mode", "addresses", "reasons", "error", "words"),
    [
        ("shm", TCP, {}, UnknownTransport, "transport 'shm' is wanted here, the decode worker offers tcp://h:1"),
        ("auto", ("pigeon://roof",), {}, UnknownTransport, "offers pigeon://roof"),
        ("shm", BOTH, {"shm": "far"}, ChannelLost, "shm: far"),
        ("auto", BOTH, {"shm": "far", "tcp": "cut"}, ChannelLost, "shm: far; tcp: cut"),
    ],
)
def test_nothing_to_choose(
    mode: str, addresses: tuple[str, ...], reasons: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Chooser(mode, reach=Reach(**reasons)).choose(addresses)


def test_what_this_side_cannot_do() -> None:
    unusable = {"shm": "the pool is on a GPU"}
    with pytest.raises(ConfigError, match="transport 'shm' cannot be used: the pool is on a GPU"):
        Chooser("shm", unusable)
    chooser = Chooser("auto", unusable, Reach())
    assert chooser.choose(BOTH) == "tcp://h:1"
    assert chooser.fallbacks == 1


def window(ticket: bytes, block: int) -> Window:
    return Window(ticket, (block,), (1,), 8)


async def test_auto_listens_by_all_and_a_window_is_open_and_closed_in_all() -> None:
    receiver = listen("auto", "127.0.0.1", memoryview(bytearray(64)), TransportConfig())
    try:
        assert isinstance(receiver, Receivers)
        assert [address.partition("://")[0] for address in receiver.addresses] == ["shm", "tcp"]
        assert receiver.address == receiver.addresses[0]
        receiver.open(window(bytes(16), 1), lambda _: None, lambda *_: None)
        with pytest.raises(InvariantViolation):
            receiver.open(window(bytes(16), 2), lambda _: None, lambda *_: None)
        await receiver.close_window(bytes(16))
        receiver.open(window(bytes(16), 1), lambda _: None, lambda *_: None)
    finally:
        await receiver.close()
    with pytest.raises(ChannelLost):
        receiver.open(window(bytes(16), 3), lambda _: None, lambda *_: None)


UCXES = ("ucx://h:1", "ucxx://h:2")


@pytest.mark.parametrize(
    ("offered", "lacking", "chosen", "fallbacks"),
    [
        (UCXES, {}, UCXES[0], 0),
        (UCXES, {"ucx": "no compiler"}, UCXES[1], 1),
        (UCXES[1:], {}, UCXES[1], 0),
        (UCXES[:1], {"ucxx": "not installed"}, UCXES[0], 0),
    ],
)
def test_ucxx_stands_in_for_ucx(offered: tuple[str, ...], lacking: dict[str, str], chosen: str, fallbacks: int) -> None:
    chooser = Chooser("ucx", reach=Reach(), lacks=lacking.get)
    assert chooser.choose(offered) == chosen
    assert chooser.fallbacks == fallbacks


def test_ucx_where_neither_is_here() -> None:
    lacking = {"ucx": "no compiler", "ucxx": "not installed"}
    with pytest.raises(ConfigError, match="transport 'ucx' cannot be used: no compiler; not installed"):
        Chooser("ucx", lacks=lacking.get)
    # A scheme that is named has nobody to stand in for it, and says what is wrong when it is made.
    assert Chooser("ucxx", reach=Reach(), lacks=lacking.get).choose(UCXES) == UCXES[1]


async def test_auto_goes_without_what_does_not_work_here() -> None:
    with pytest.raises(ConfigError, match=r"no transport can be used here: shm: .*read-only.*; tcp: .*read-only"):
        listen("auto", "127.0.0.1", memoryview(bytes(64)), TransportConfig())
    receiver = listen("auto", "no.such.host.invalid", memoryview(bytearray(64)), TransportConfig())
    assert [address.partition("://")[0] for address in receiver.addresses] == ["shm"]
    await receiver.close()
    with pytest.raises(ConfigError):
        listen("tcp", "no.such.host.invalid", memoryview(bytearray(64)), TransportConfig())


def test_pages_go_only_where_no_library_may_have_pinned_them() -> None:
    # UCX and NIXL register memory, and read or write the old pages for as long as they have it registered.
    assert {"auto", "shm", "tcp", "inproc"} == UNPINNED
    # Between GPUs nothing lands in host memory.
    assert set(MODES) - UNPINNED == {"ucx", "ucxx", "nixl", "cuda_ipc"}
