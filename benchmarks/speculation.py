"""What speculation gains: decoding with drafts and without, in turn, by the kind of text and the batch.

The decode scheduler, its block pool and the engine in one thread, no sockets; the prompt is computed where decode would
have received it. Each round decodes the same requests with every setting, and a ratio is the median of the rounds', so
what runs beside us hits all of them alike. The tokens of all settings are compared too.
Usage: ``python benchmarks/speculation.py --model DIRECTORY`` (``kvferry model path smollm2-135m`` names one).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from decode_worker.scheduler import DecodeScheduler
from decode_worker.speculation import Speculation
from decode_worker.speculator import Speculator
from decode_worker.step import chunks_of
from engine.batch import Chunk
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.runner import ModelRunner
from protocol.ids import Peer, RequestKey
from protocol.messages import PrefillAddress, Reserve
from protocol.sampling import SamplingParams
from router.tokenizer import Tokenizer

ROUTER = Peer("router-0", 1)
PREFILL = PrefillAddress(peer=Peer("prefill-0", 1), endpoint="tcp://127.0.0.1:1")
TEXT = (
    "The ferry between the two islands leaves every hour from seven in the morning until ten at night. In winter the "
    "last boat leaves at eight. A ticket costs four euros, children under six travel free, and bicycles cost two euros "
    "more. The crossing takes twenty-five minutes when the sea is calm. When the wind is strong the ferry waits in the "
    "harbour, and passengers may use the small café on the pier, which sells soup, bread and hot tea."
)
TASKS = {
    "copy": (f"Repeat this text word for word:\n\n{TEXT}", 0.0),
    "summary": (f"Summarise this text:\n\n{TEXT}", 0.0),
    "prose": ("Write a short story about an old lighthouse keeper and a storm.", 0.9),
}
"""Question and temperature. Greedy prose of a small model repeats itself, which would flatter."""


@dataclass(frozen=True)
class Outcome:
    """One round of one setting: its seconds, and what came."""

    seconds: float
    texts: tuple[tuple[int, ...], ...]
    turns: int
    drafted: int
    accepted: int

    @property
    def tokens(self) -> int:
        """Drawn by decode."""
        return sum(map(len, self.texts))


class Bench:
    """One engine; a new scheduler for each round."""

    def __init__(self, model: Path, threads: int, now: Callable[[], float]) -> None:
        self.runner = ModelRunner.load(EngineConfig(model=str(model), threads=threads, num_blocks=1024))
        self.runner.warm_up()
        self.tokenizer = Tokenizer(model)
        self._now = now

    def requests(self, task: str, batch: int, tokens: int) -> list[Reserve]:
        """``batch`` requests, each with a salt of its own, so that none finds another's blocks."""
        question, temperature = TASKS[task]
        prompt = self.tokenizer.encode_chat([{"role": "user", "content": question}])
        return [
            Reserve(
                key=RequestKey(f"request-{index}", 0),
                token_ids=prompt,
                sampling=SamplingParams(temperature=temperature, seed=index, max_tokens=tokens),
                prefill=PREFILL,
                cache_salt=str(index),
            )
            for index in range(batch)
        ]

    def decode(self, requests: Sequence[Reserve], speculation: Speculation | None) -> Outcome:
        """Everything from the first token of each request on."""
        size, rows = self.runner.layout.block_size, self.runner.config.max_sequences
        pool = BlockPool(self.runner.num_blocks, size, prefix_cache=False)
        speculator = None if speculation is None else Speculator(speculation, pool, block_size=size, max_rows=rows)
        scheduler = DecodeScheduler(pool, block_size=size, max_sequences=rows, speculator=speculator)
        for request in requests:
            scheduler.add(request, ROUTER, 0.0)
        for sequence in scheduler.admit():
            sampling = sequence.request.sampling
            (drawn,) = self.runner.execute([Chunk(sequence.token_ids, 0, sequence.block_table, sampling)])
            assert drawn is not None
            scheduler.commit(sequence.key, drawn.token_id, 0.0)
        texts: dict[RequestKey, list[int]] = {request.key: [] for request in requests}
        turns = 0
        began = self._now()
        while stepping := scheduler.next_step().sequences:
            turns += len(stepping)
            for output in scheduler.complete_step(self.runner.execute(chunks_of(stepping))):
                texts[output.sequence.key] += [draw.token_id for draw in output.draws]
        seconds = self._now() - began
        drafted, accepted = (speculator.drafted, speculator.accepted) if speculator else (0, 0)
        return Outcome(seconds, tuple(map(tuple, texts.values())), turns, drafted, accepted)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face model directory")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--batches", default="1,4,16", help="requests side by side")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--drafts", default="4,8", help="longest drafts, each a setting")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="of the one thread, where others share its core")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    if options.cpu_time and options.threads > 1:
        parser.error("--cpu-time counts one thread only")
    now = time.thread_time if options.cpu_time else time.perf_counter
    settings = {f"up to {most}": Speculation(tokens=int(most)) for most in options.drafts.split(",")}
    bench = Bench(options.model, options.threads, now)

    rows = []
    print(f"{options.threads} thread(s), {bench.runner.layout.dtype}, medians of {options.runs} rounds in turn\n")
    print("| text | batch | tokens/s plain | drafts | of plain | tokens a step | accepted | same text |")
    print("|---|---|---|---|---|---|---|---|")
    for task in options.tasks.split(","):
        for batch in map(int, options.batches.split(",")):
            requests = bench.requests(task, batch, options.tokens)
            rounds = [
                [bench.decode(requests, setting) for setting in (None, *settings.values())] for _ in range(options.runs)
            ]
            plain = statistics.median(outcomes[0].tokens / outcomes[0].seconds for outcomes in rounds)
            for place, name in enumerate(settings, 1):
                ratio = statistics.median(outcomes[0].seconds / outcomes[place].seconds for outcomes in rounds)
                outcome = rounds[0][place]
                share = outcome.accepted / outcome.drafted if outcome.drafted else 0.0
                same = sum(a == b for a, b in zip(outcome.texts, rounds[0][0].texts, strict=True))
                print(
                    f"| {task} | {batch} | {plain:.1f} | {name} | {ratio:.2f} | {outcome.tokens / outcome.turns:.2f} | "
                    f"{share:.2f} of {outcome.drafted} | {same} of {batch} |",
                    flush=True,
                )
                rows.append(
                    {"task": task, "batch": batch, "drafts": name, "plain": plain, "ratio": ratio, "accepted": share}
                )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
