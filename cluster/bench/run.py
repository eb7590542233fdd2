"""Runs the cases one after the other against one far end, whatever becomes of each."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.bench import limit, near_end, perftest
from cluster.bench.block_table import transfers
from cluster.bench.case import Case
from cluster.bench.near_end import Session, Setup
from cluster.bench.report import Measured, Outcome
from cluster.bench.rivals.contest import Contest, Invitation, OnRival, RivalState, entered
from cluster.bench.statistics import latency, paired_ratio, rate
from protocol.errors import ConnectionFailed, KVFerryError, Overloaded, VersionMismatch

MIN_ROUNDS = 5
MAX_ROUNDS = 10_000
PATIENCE = 0.5
"""Of the time limit: after this share no further round begins, though there be fewer than :data:`MIN_ROUNDS`."""

OnCase = Callable[[Case, float], None]
"""Called with a case that is measured, and how much of it is done, in [0, 1]."""
OnOutcome = Callable[[Outcome], None]
NOBODY = Invitation((), "")


def _untold(_state: RivalState) -> None:
    """Nobody asked."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a case is measured.

    Attributes:
        seconds: rounds begin for so long, and there are at least :data:`MIN_ROUNDS`.
        time_limit: seconds after which a case has failed.
    """

    seconds: float
    time_limit: float


async def run(
    cases: Sequence[Case],
    where: tuple[str, int],
    setup: Setup,
    effort: Effort,
    on_case: OnCase,
    on_outcome: OnOutcome,
    *,
    rivals: Invitation = NOBODY,
    on_rival: OnRival = _untold,
) -> None:
    """Measure ``cases`` with the far end at ``where``; each gives one outcome.

    The invited rivals take their turns on this machine, in the same rounds.

    A transport that does not work between the two ends is skipped. After a case that failed, both ends make a new
    start, so that it spoils no other.

    Raises:
        ConnectionFailed, Overloaded, VersionMismatch: the far end does not answer, or not any more, serves another
            peer, or is of another version.
    """
    for _, group in itertools.groupby(cases, key=lambda case: case.transport):
        left = list(group)
        scheme, tls = left[0].scheme, left[0].ucx_tls
        held = dataclasses.replace(setup, config=dataclasses.replace(setup.config, ucx_tls=tls))
        while left:
            try:
                async with (
                    near_end.opened(*where, scheme, held) as session,
                    entered(rivals, scheme, tls, setup.layout, setup.blocks, on_rival) as contest,
                ):
                    await _run_until_failure(left, session, contest, setup, effort, on_case, on_outcome)
            except (ConnectionFailed, Overloaded, VersionMismatch):
                raise
            except KVFerryError as error:
                for case in left:
                    on_outcome(Outcome(case=case, state="skipped", reason=error.message))
                break


async def _run_until_failure(
    left: list[Case],
    session: Session,
    contest: Contest,
    setup: Setup,
    effort: Effort,
    on_case: OnCase,
    on_outcome: OnOutcome,
) -> None:
    while left:
        case = left.pop(0)
        try:
            async with asyncio.timeout(effort.time_limit):
                measured = await _measure(case, session, contest, setup, effort, on_case)
        except TimeoutError:
            reason = f"not done within {effort.time_limit:g} seconds"
        except KVFerryError as error:
            reason = error.message
        else:
            on_outcome(Outcome(case=case, state="measured", measured=measured))
            continue
        on_outcome(Outcome(case=case, state="failed", reason=reason))
        return


async def _measure(
    case: Case, session: Session, contest: Contest, setup: Setup, effort: Effort, on_case: OnCase
) -> Measured:
    """Rounds of the transport, its limit and its rivals in turn; the first of each is checked and does not count."""
    began = time.monotonic()
    moved = transfers(case, setup.layout, setup.blocks, seed=setup.seed)
    held_against = limit.limit_of(case.transport, same_host=session.same_host, perftest=perftest.find() is not None)
    on_case(case, 0.0)
    await session.ship_round(moved, checked=True)
    await limit.begin(held_against, session, moved)
    await limit.limit_round(held_against, session, moved)
    await contest.prepare(moved)
    seconds: list[float] = []
    walls: list[float] = []
    limits: list[float] = []

    async def ours() -> None:
        found = await session.ship_round(moved)
        seconds.extend(found.seconds)
        walls.append(found.wall)

    async def theirs() -> None:
        limits.append(await limit.limit_round(held_against, session, moved))

    turns = [ours, theirs, *contest.turns()]
    order = random.Random(setup.seed)  # noqa: S311
    started = time.monotonic()
    while len(walls) < MAX_ROUNDS:
        now = time.monotonic()
        enough = now - started >= effort.seconds and len(walls) >= MIN_ROUNDS
        if walls and (enough or now - began >= PATIENCE * effort.time_limit):
            break
        # Whoever moves blocks that were moved a moment ago finds them in a cache, so nobody always comes after another.
        order.shuffle(turns)
        for turn in turns:
            await turn()
        on_case(case, min(1.0, max((now - started) / effort.seconds, len(walls) / MAX_ROUNDS)))
    nbytes = case.blocks(setup.layout) * setup.layout.block_bytes
    return Measured(
        blocks=case.blocks(setup.layout),
        nbytes=nbytes,
        rounds=len(walls),
        latency=latency(seconds),
        gb_per_s=rate(nbytes * case.concurrency, walls),
        limit=held_against,
        limit_gb_per_s=rate(nbytes * case.concurrency, limits),
        ratio=paired_ratio(walls, limits),
        rivals=contest.figures(walls, nbytes * case.concurrency),
    )
