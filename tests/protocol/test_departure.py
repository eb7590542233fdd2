from __future__ import annotations

import asyncio

from protocol.departure import DEPARTURES, HAND_BACK_SECONDS, QUIET, Departure, DepartureEvent, DepartureState, Leaver

FINISHING, HANDING_BACK, GONE = DepartureState.FINISHING, DepartureState.HANDING_BACK, DepartureState.GONE


def test_one_that_serves_is_left_alone() -> None:
    departure = Departure("decode-0")
    assert departure.look(1e9, idle=True) is None
    assert departure.state is DepartureState.SERVING


def test_one_with_nothing_to_do_is_gone_once_it_was_quiet() -> None:
    departure = Departure("decode-0")
    departure.begin(60.0, 10.0)
    assert departure.look(10.0, idle=True) is None
    assert departure.look(10.0 + QUIET / 2, idle=False) is None, "something came after all"
    assert departure.look(10.0 + QUIET, idle=True) is None
    assert departure.look(10.0 + 2 * QUIET, idle=True) is GONE
    assert departure.look(1e9, idle=True) is None


def test_what_is_not_finished_in_time_is_handed_back_and_gets_time_to_come_to_rest() -> None:
    departure = Departure("decode-0")
    departure.begin(60.0, 0.0)
    assert departure.look(59.9, idle=False) is None
    assert departure.look(60.0, idle=False) is HANDING_BACK
    assert departure.look(60.1, idle=False) is None
    assert departure.look(60.0 + HAND_BACK_SECONDS, idle=False) is GONE


def test_asked_twice_the_earlier_end_counts() -> None:
    departure = Departure("decode-0")
    departure.begin(60.0, 0.0)
    departure.begin(5.0, 1.0)
    departure.begin(600.0, 2.0)
    assert departure.look(6.0, idle=False) is HANDING_BACK
    departure.begin(0.0, 7.0)
    assert departure.look(7.0, idle=False) is None, "it is at it already"


def test_every_way_leads_out() -> None:
    assert DEPARTURES.is_final(GONE)
    for state in (FINISHING, HANDING_BACK):
        assert DEPARTURES.allows(state, DepartureEvent.QUIET)
        assert DEPARTURES.allows(state, DepartureEvent.TIME_UP)


async def test_the_shell_announces_first_and_hands_back_once() -> None:
    told: list[str] = []
    busy = True
    leaver = Leaver(
        "decode-0",
        idle=lambda: not busy,
        hand_back=lambda: told.append("hand back"),
        announce=lambda: told.append(f"leaving: {leaver.leaving}"),
    )
    leaver.tick()
    assert (told, leaver.leaving) == ([], False)
    leaver.begin(0.0)
    for _ in range(3):
        leaver.tick()
    assert told == ["leaving: True", "hand back"]
    assert not leaver.left.done()
    busy = False

    async def ticking() -> None:
        while not leaver.left.done():
            leaver.tick()
            await asyncio.sleep(0.01)

    await asyncio.wait_for(asyncio.gather(ticking(), leaver.left), 60)
