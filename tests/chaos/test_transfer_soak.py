"""Either side of a transfer killed or stopped at a random point of it: the other knows, goes on, and leaks nothing.

``pytest tests/chaos/test_transfer_soak.py --fault-points 200 -s`` is the long version.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from crew import crew
from fault_points import draw_point
from survivor import Survivor
from ucx_here import need_ucx
from ucx_segments import none_left

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(params=["shm", "tcp", pytest.param("ucx", marks=pytest.mark.ucx)])
def scheme(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "ucx":
        need_ucx()
    with none_left():
        yield request.param


async def test_a_peer_that_is_killed_or_stopped_anywhere(
    scheme: str, tmp_path: Path, fault_seed: int, fault_points: int
) -> None:
    async with crew("peer", tmp_path) as hands, Survivor(scheme, hands) as survivor:
        await survivor.prepare()
        for number in range(fault_points):
            try:
                await survivor.strike(draw_point(fault_seed, scheme, number))
            except BaseException as error:
                error.add_note(f"{scheme}, point {number} of --fault-seed {fault_seed}")
                raise
        await survivor.finish()
    print(f"\n{scheme}: {fault_points} points, struck {dict(survivor.struck)}, held {survivor.held}")
    for what, seconds in sorted(survivor.known.items()):
        ordered = sorted(seconds)
        print(
            f"  {what}: {len(ordered)}, p50 {ordered[len(ordered) // 2] * 1e3:.1f} ms, max {ordered[-1] * 1e3:.1f} ms"
        )
