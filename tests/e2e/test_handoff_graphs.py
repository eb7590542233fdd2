"""A decode worker whose steps are recorded and replayed gives the same text; a prefill worker records nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from oracle import Oracle
from rack import rack
from recorded_decodes import CPU, Rerun, StaticAttention
from test_handoff_text import prompts

from engine.runner import ModelRunner


async def test_the_same_text_from_replayed_steps(
    tiny_llama_dir: Path, tiny_oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders: list[Rerun] = []

    def warm_up(runner: ModelRunner, *, decodes: bool = True) -> None:
        if decodes:
            runner._backend = StaticAttention(runner.layout, CPU)
            recorders.append(Rerun())
            assert runner.capture_decodes(recorders[-1]) == (1, 2, 4)

    monkeypatch.setattr(ModelRunner, "warm_up", warm_up)
    async with rack(tiny_llama_dir, engine={"num_blocks": 129, "cuda_graph_batches": (1, 2, 4)}) as running:
        asked = prompts(tiny_oracle, (1, 4, 5, 37, 12, 20))
        answers = [(await running.ask(prompt)).token_ids for prompt in asked[:1]]
        answers += [answer.token_ids for answer in await asyncio.gather(*[running.ask(each) for each in asked[1:]])]
        assert answers == [tiny_oracle.greedy(prompt, 12) for prompt in asked]
    (recorder,) = recorders
    # The largest size first: alone a request is a batch of one, and some of several were together.
    assert recorder.replayed.count(2) >= 11
    assert set(recorder.replayed) > {2}
