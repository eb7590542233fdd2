"""What has been idle for an hour serves the next request as if nothing had been."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from oracle import Oracle
from pace import allowed
from rack import rack
from test_handoff_faults import check_alive

HOUR = 3600.0
BOUND = 10.0
"""Seconds; a machine that has other things to do included."""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_the_first_transfer_after_an_hour(
    transport: str, tiny_llama_dir: Path, tiny_oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic
    async with rack(tiny_llama_dir, ship_by=transport, listen_by=transport) as running:
        await check_alive(running, tiny_oracle)
        await running.settle()
        # All at once: nobody has sent a heartbeat, renewed or looked at anything meanwhile.
        monkeypatch.setattr(time, "monotonic", lambda: clock() + HOUR)
        begun = clock()
        await check_alive(running, tiny_oracle)
        answer = await running.ask(range(5, 40), salt="not seen before")
        assert clock() - begun < allowed(BOUND)
        assert answer.report is not None
        assert (answer.report.attempts, answer.report.transport) == (1, transport)
        assert answer.token_ids == tiny_oracle.greedy([*range(5, 40)], 12)
