"""Sampled under drafts: every token has the model's own distribution, and each seed its one text."""

from __future__ import annotations

import math

import torch

from decode_worker.scheduler import DecodeScheduler
from decode_worker.speculation import Speculation
from decode_worker.speculator import Speculator
from decode_worker.step import chunks_of
from engine.batch import Chunk, Draw
from engine.block_pool import BlockPool
from engine.logit_rules import Row
from engine.sampler import sample
from protocol.ids import Peer, RequestKey
from protocol.messages import PrefillAddress, Reserve
from protocol.sampling import SamplingParams

ROUTER = Peer("router-0", 1)
PREFILL = PrefillAddress(peer=Peer("prefill-0", 1), endpoint="tcp://127.0.0.1:1")
BLOCK = 4
VOCABULARY = 5
PROMPT = (0, 1, 2, 3, 4, 0, 2, 4, 1, 3)
REQUESTS, TOKENS, SIDE_BY_SIDE = 320, 24, 80


class MarkovEngine:
    """The logits of the next token depend on the last one alone."""

    def __init__(self) -> None:
        self.logits = 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(4))

    def execute(self, chunks: list[Chunk]) -> list[Draw]:
        rows = [Row(chunk.sampling, chunk.position) for chunk in chunks if chunk.sampling is not None]
        return sample(self.logits[[chunk.token_ids[-1] for chunk in chunks]], rows)


def texts(
    engine: MarkovEngine, speculation: Speculation | None
) -> tuple[dict[str, list[int]], list[tuple[int, int, int]]]:
    """The text of each request, and (token before, draft, drawn) of each row that was drafted for and counted."""
    pool = BlockPool(1024, BLOCK, prefix_cache=False)
    settings = {"block_size": BLOCK, "max_sequences": SIDE_BY_SIDE}
    rows = SIDE_BY_SIDE * 9
    speculator = speculation and Speculator(speculation, pool, block_size=BLOCK, max_rows=rows)
    subject = DecodeScheduler(pool, **settings, speculator=speculator)
    for index in range(REQUESTS):
        sampling = SamplingParams(temperature=1.0, seed=index, max_tokens=TOKENS)
        key = RequestKey(f"r{index:04}", 0)
        subject.add(Reserve(key=key, token_ids=PROMPT, sampling=sampling, prefill=PREFILL), ROUTER, 0.0)
    found: dict[str, list[int]] = {}
    judged = []
    while True:
        for sequence in subject.admit():
            (first,) = engine.execute([Chunk(PROMPT[-1:], 0, (), sequence.request.sampling)])
            found[sequence.key.request_id] = [first.token_id]
            subject.commit(sequence.key, first.token_id, 0.0)
        stepping = subject.next_step().sequences
        if not stepping:
            return found, judged
        drafts = {sequence.key: (sequence.token_ids[-1], *sequence.draft) for sequence in stepping}
        for output in subject.complete_step(engine.execute(chunks_of(stepping))):
            drawn = [draw.token_id for draw in output.draws]
            tried = drafts[output.sequence.key]
            judged += list(zip(tried, tried[1:], drawn, strict=False))
            found[output.sequence.key.request_id] += drawn


def test_tokens_under_drafts_have_the_models_distribution() -> None:
    engine = MarkovEngine()
    found, judged = texts(engine, Speculation(tokens=4, min_match=1, max_match=3))
    assert sum(draft == drawn for _, draft, drawn in judged) > 1000
    assert sum(draft != drawn for _, draft, drawn in judged) > 1000
    probabilities = torch.softmax(engine.logits.double(), -1)
    # Over the rows that had a draft, accepted or not: by the token before it, and by the draft.
    statistic, freedom = 0.0, 0
    for before in range(VOCABULARY):
        for draft in range(VOCABULARY):
            counts = torch.zeros(VOCABULARY, dtype=torch.double)
            for row in judged:
                if row[:2] == (before, draft):
                    counts[row[2]] += 1
            expected = probabilities[before] * counts.sum()
            if counts.sum() < 100:
                continue
            statistic += float(((counts - expected) ** 2 / expected).sum())
            freedom += VOCABULARY - 1
    assert freedom >= 40
    # The normal approximation of Wilson and Hilferty (1931), five standard deviations.
    spread = math.sqrt(2 / (9 * freedom))
    assert ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / spread < 5

    plain, _ = texts(engine, None)
    assert found == plain
