"""What a step tells of prompt tokens is what transformers says of them, wherever the chunks end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import prompt_logprobs
from engine.batch import Chunk
from engine.config import EngineConfig
from engine.prompt_logprobs import PromptSpan
from engine.runner import ModelRunner
from protocol.errors import EngineFailure, InvariantViolation
from protocol.prompt_logprobs import LogprobRow, LogprobTable
from protocol.sampling import SamplingParams

PROMPT = [9, 4, 30, 9, 12, 7, 4, 4, 50, 9, 33, 200, 31, 8, 77, 6, 5, 44, 90]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def runner(tiny_llama_dir: Path) -> ModelRunner:
    config = EngineConfig(model=str(tiny_llama_dir), dtype="float32", num_blocks=20, block_size=4, threads=1)
    return ModelRunner.load(config)


@pytest.fixture(scope="module")
def truth(tiny_llama_dir: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], -1)


def rows_of(tables: list[LogprobTable]) -> list[LogprobRow]:
    return [row for table in tables for row in table.rows()]


def span(start: int, stop: int, alternatives: int, tables: list[LogprobTable]) -> PromptSpan:
    return PromptSpan(0, PROMPT[start + 1 : stop + 1], alternatives, tables.append)


@pytest.mark.parametrize("ends", [[19], [4, 8, 19], [1, 2, 3, 19], [16, 19]], ids=str)
@pytest.mark.parametrize("alternatives", [0, 1, 5])
def test_each_prompt_token_has_the_log_probability_of_transformers(
    ends: list[int], alternatives: int, runner: ModelRunner, truth: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A few rows at a time: a table ends in mid-chunk.
    monkeypatch.setattr(prompt_logprobs, "_MOST_LOGITS", 3 * runner.vocab_size)
    monkeypatch.setattr(prompt_logprobs, "_CACHED_LOGITS", 2 * runner.vocab_size)
    tables: list[LogprobTable] = []
    start = 0
    for stop in ends:
        chunk = Chunk(
            PROMPT[start:stop],
            start,
            [5, 3, 9, 1, 2],
            GREEDY if stop == len(PROMPT) else None,
            span=span(start, stop, alternatives, tables),
        )
        # Beside a prompt that nobody asks about, and one that wants nothing at all.
        other = Chunk([7, 8, 9], 0, [11], GREEDY)
        draws = runner.execute([other, chunk, Chunk([3], 0, [12])])
        start = stop
    rows = rows_of(tables)
    assert len(rows) == len(PROMPT) - 1
    assert max(map(len, tables)) <= 3
    assert draws[1] is not None
    assert draws[1].token_id == int(truth[-1].argmax())
    for line, token, row in zip(truth, PROMPT[1:], rows, strict=False):
        assert row.logprob == pytest.approx(float(line[token]), abs=1e-3)
        assert row.rank == 1 + int((line > line[token]).sum())
        best = torch.topk(line, alternatives)
        assert [number for number, _ in row.top] == best.indices.tolist()
        assert [value for _, value in row.top] == pytest.approx(best.values.tolist(), abs=1e-3)


def test_logits_are_made_for_those_who_ask_alone(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    head = runner._model.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        made.append(hidden.shape[0])
        return head(hidden)

    monkeypatch.setattr(runner._model, "logits", counted)
    table = [5, 3, 9, 1, 2]
    runner.execute([Chunk(PROMPT, 0, table, GREEDY), Chunk([7, 8], 0, [11], GREEDY)])
    assert made == [2]
    made.clear()
    tables: list[LogprobTable] = []
    runner.execute(
        [Chunk(PROMPT, 0, table, GREEDY), Chunk(PROMPT[:8], 0, [11, 12], span=span(0, 8, 0, tables))],
    )
    assert made == [8, 1]
    assert len(rows_of(tables)) == 8


def test_a_span_must_follow_tokens_of_its_chunk(runner: ModelRunner) -> None:
    tables: list[LogprobTable] = []
    with pytest.raises(InvariantViolation, match="follow none of its tokens"):
        runner.execute([Chunk(PROMPT[:4], 0, [1], span=PromptSpan(1, PROMPT[1:5], 0, tables.append))])
    with pytest.raises(InvariantViolation, match="nothing to tell"):
        PromptSpan(0, [], 0, tables.append)
    assert not tables


def test_poisoned_context_is_an_engine_failure_not_a_number(runner: ModelRunner) -> None:
    runner.cache.tensor[15] = torch.nan
    tables: list[LogprobTable] = []
    with pytest.raises(EngineFailure, match="not finite"):
        runner.execute([Chunk(PROMPT[4:8], 4, [15, 16], span=span(4, 8, 2, tables))])
    assert not tables
