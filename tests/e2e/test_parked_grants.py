"""Grants of requests that nobody knows wait in a bounded place: bounded in bytes too, not only in number."""

from __future__ import annotations

from kv_transfer.parking import Parking
from protocol.errors import LeaseRefused
from protocol.ids import Peer, RequestKey
from protocol.layout import KVLayout
from protocol.messages import MAX_BLOCKS, Abort, ErrorInfo, Grant

LAYOUT = KVLayout(num_layers=1, kv_heads=1, head_dim=4, block_size=4)
STRANGER = Peer("stranger", 1)


def grant(name: str, blocks: tuple[int, ...]) -> Grant:
    return Grant(
        key=RequestKey(name, 0),
        first_block=0,
        blocks=blocks,
        generations=blocks,
        layout=LAYOUT,
        addresses=("tcp://127.0.0.1:1",),
        ticket=b"t" * 16,
        ttl=30.0,
    )


def test_the_longest_grants_of_a_stranger_do_not_pile_up() -> None:
    parking, longest = Parking(), tuple(range(MAX_BLOCKS))
    parked = sum(parking.park(STRANGER, grant(f"r{index}", longest), 0.0) for index in range(100))
    assert parked <= 1, f"{parked} grants of {MAX_BLOCKS} blocks wait"


def test_room_comes_back_however_a_parked_grant_ends() -> None:
    parking = Parking(max_blocks=4)
    error = ErrorInfo.of(LeaseRefused("no more"))
    for end in ("taken", "expired", "sender lost", "aborted"):
        assert parking.park(STRANGER, grant("a", (1, 2, 3)), 0.0)
        assert parking.park(STRANGER, grant("a", (1, 2, 3)), 0.0), "the same again"
        assert not parking.park(STRANGER, grant("b", (1, 2)), 0.0)
        match end:
            case "taken":
                parking.take(RequestKey("a", 0))
            case "expired":
                parking.take_expired(100.0)
            case "sender lost":
                parking.drop_sender(STRANGER)
            case "aborted":
                assert parking.park(STRANGER, Abort(key=RequestKey("a", 0), error=error), 0.0)
        assert parking.park(STRANGER, grant("b", (1, 2, 3, 4)), 0.0), end
        parking.take(RequestKey("a", 0))
        parking.take(RequestKey("b", 0))
