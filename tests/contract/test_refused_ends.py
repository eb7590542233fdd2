"""Ends and windows that cannot be are refused when they are made, whatever the transport."""

import pytest
from ferry import BIND, as_pool

from kv_transfer.transport import Window, make_receiver, make_sender
from protocol.errors import ConfigError, InvariantViolation, UnknownTransport

BLOCK = 4096


async def test_windows_are_checked_when_opened(scheme, harbor):
    there = harbor(scheme, 4, BLOCK)
    with pytest.raises(ConfigError, match="block 4 of 4096 bytes"):
        there.open([1, 4])
    ticket = there.open([1, 2])
    with pytest.raises(InvariantViolation, match="block 2"):
        there.open([2, 3])
    again = Window(ticket, (3,), (1,), BLOCK)
    with pytest.raises(InvariantViolation, match="ticket"):
        there.receiver.open(again, lambda _: None, lambda *_: None)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"ticket": b"short"}, "ticket"), ({"block_bytes": 0}, "block_bytes"), ({"generations": (1,)}, "generations"),
     ({"blocks": (1, 1)}, "blocks"), ({"blocks": (-1, 1)}, "blocks")],
)  # fmt: skip
def test_a_window_names_what_is_wrong_with_it(change: dict[str, object], field: str) -> None:
    values: dict[str, object] = {"ticket": bytes(16), "blocks": (1, 2), "generations": (1, 1), "block_bytes": 8}
    with pytest.raises(ConfigError) as caught:
        Window(**(values | change))
    assert caught.value.field == field


async def test_memory_that_will_not_do_is_refused(scheme):
    with pytest.raises(ConfigError, match=r"read-only|in host memory"):
        make_receiver(BIND[scheme], memoryview(bytes(8)))
    with pytest.raises(ConfigError, match=r"contiguous|in host memory"):
        make_receiver(BIND[scheme], memoryview(bytearray(8))[::2])
    with pytest.raises(ConfigError, match=r"contiguous|in host memory"):
        make_sender(scheme, memoryview(bytes(8))[::2])


@pytest.mark.parametrize("address", ["pigeon://roof", "127.0.0.1:80", ""])
def test_an_unknown_scheme_lists_the_known_ones(address: str) -> None:
    with pytest.raises(UnknownTransport, match="cuda_ipc, inproc, nixl, shm, tcp, ucx, ucxx"):
        make_receiver(address, memoryview(bytearray(8)))
    with pytest.raises(UnknownTransport, match="cuda_ipc, inproc, nixl, shm, tcp, ucx, ucxx"):
        make_sender("pigeon", memoryview(bytearray(8)))


async def test_an_address_in_use_is_refused(scheme, harbor):
    there = harbor(scheme, 1, BLOCK)
    with pytest.raises(ConfigError, match=r"address|listen"):
        make_receiver(there.address, as_pool(scheme, memoryview(bytearray(8))))
