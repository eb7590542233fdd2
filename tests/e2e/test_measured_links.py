"""What a real router reckons with of the links between real workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rack import rack

GBIT = 4.0


async def test_a_router_knows_a_link_from_what_workers_tell_and_then_from_what_it_saw(tiny_llama_dir: Path) -> None:
    async with rack(tiny_llama_dir, transfer={"link_gbit": GBIT}) as running:
        for worker in (*running.prefill, *running.decode):
            assert worker.profile is not None
            assert worker.profile.link_rate == pytest.approx(GBIT * 1e9 / 8)
        fleet = running.service._placer._fleet
        answer = await running.ask(list(range(5, 37)), max_tokens=6)
        row, partner = (fleet.row(worker.me.name) for worker in (running.prefill[0], running.decode[0]))
        assert answer.report is not None
        assert fleet.links._pair_bytes[partner, row] == answer.report.kv_bytes > 0
        assert 0.0 < fleet.links._pair_seconds[partner, row] <= np.float32(answer.report.ship_s)
        (told,) = running.service.explain(answer.report.request_id)
        assert told["predicted"]["transfer_s"] > 0.0
        assert told["measured"]["tpot_s"] > 0.0
