"""Takes the figures: requests alone in turn, then streams that decode while long prompts arrive."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path

import msgspec

from cluster.bench.disaggregation.figures import (
    APART,
    TOGETHER,
    AloneRow,
    DisaggregationReport,
    LoadRow,
    Request,
)
from cluster.bench.disaggregation.stage import Stage, staged, two_cores
from cluster.bench.latency import HIGHEST_TOKEN_ID, LOWEST_TOKEN_ID
from cluster.bench.machine import this_machine
from cluster.bench.statistics import latency
from protocol.errors import ConfigError
from protocol.histogram import Histogram
from protocol.sampling import SamplingParams
from router.front.generation import Generation, GenerationReport
from router.service import Service

STREAM_PROMPT, STREAM_OUTPUT = 16, 256
WARM_PROMPT, WARM_OUTPUT = 64, 4
"""Asked before each request that counts. The weights of an engine that rests leave the caches that it shares with
others, and its next step takes up to twice as long; under load no engine rests."""
QUIET = 2.0
"""Seconds of streams alone before the first long prompt."""
SHORTEST = 1e-6
"""Seconds that are told from none: two tokens that this process read in one go came at one moment."""
SAMPLES = 200
"""Gaps that are kept for the picture."""

OnTurn = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationOptions:
    """What to measure; the fields are the command's options.

    Raises:
        ConfigError: a value is out of range; names the field and the value.
    """

    model: Path
    tokens: tuple[int, ...]
    output: int
    runs: int
    chunk: int
    step_tokens: tuple[int, ...]
    streams: int
    long: int
    interval: float
    seconds: float
    rounds: int

    def __post_init__(self) -> None:
        for name, value, least in (
            ("tokens", min(self.tokens), 1),
            ("output", self.output, 3),
            ("runs", self.runs, 1),
            ("chunk", self.chunk, 16),
            ("step_tokens", min(self.step_tokens), 1),
            ("streams", self.streams, 1),
            ("long", self.long, 1),
            ("rounds", self.rounds, 1),
        ):
            if not least <= value <= 1 << 20:
                raise ConfigError(f"{name} must be in [{least}, 2**20], got {value}", field=name)

    @property
    def capacity(self) -> int:
        """Tokens that a pool needs: all streams, and more long prompts than should ever wait at once."""
        streams = self.streams * (STREAM_PROMPT + STREAM_OUTPUT + 32)
        return streams + 8 * (max(*self.tokens, self.long) + self.output + 32)


@dataclass(slots=True)
class _Load:
    """What was seen of one way under load."""

    quiet: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)
    steps: Histogram = field(default_factory=Histogram)


async def measure_disaggregation(options: DisaggregationOptions, on_turn: OnTurn) -> DisaggregationReport:
    """Bring everything up, measure, and bring it down.

    Raises:
        ConfigError: an option cannot be; this process has but one core.
        StartFailed: a worker does not come up.
    """
    rng = random.Random(0)  # noqa: S311 -- prompts
    cores = two_cores()
    async with staged(
        options.model,
        cores=cores,
        capacity=options.capacity,
        chunk=options.chunk,
        step_tokens=options.step_tokens,
    ) as stage:
        alone = await _alone(stage, cores, options, rng, on_turn)
        stage.place(cores)
        load = await _loaded(stage, options, rng, on_turn) if options.seconds else ()
    return DisaggregationReport(
        model=options.model.name,
        machine=this_machine(),
        cores=cores,
        runs=options.runs,
        streams=options.streams,
        long_tokens=options.long,
        interval=options.interval,
        seconds=options.seconds,
        alone=alone,
        load=load,
    )


async def _alone(
    stage: Stage, cores: tuple[int, ...], options: DisaggregationOptions, rng: random.Random, on_turn: OnTurn
) -> tuple[AloneRow, ...]:
    ways = {APART: stage.apart, TOGETHER: stage.here}
    taken: dict[tuple[int, str], list[Request]] = {}
    for turn in range(options.runs + 1):
        on_turn(f"alone, {turn}")
        for placed, tokens in product((cores, cores[::-1]), options.tokens):
            stage.place(placed)
            for way in rng.sample([*ways], len(ways)):
                await _ask(ways[way], WARM_PROMPT, WARM_OUTPUT, rng)
                request = await _one(ways[way], tokens, options.output, rng)
                if turn:
                    taken.setdefault((tokens, way), []).append(request)
    return tuple(alone_row(tokens, taken[tokens, APART], taken[tokens, TOGETHER]) for tokens in options.tokens)


def alone_row(tokens: int, apart: Sequence[Request], together: Sequence[Request]) -> AloneRow:
    """The medians of one prompt length; the requests of a turn stand at the same place of both."""

    def median(runs: Sequence[Request]) -> Request:
        times = [name for name in Request.__struct_fields__ if name != "kv_bytes"]
        found = {name: statistics.median(getattr(each, name) for each in runs) for name in times}
        return Request(**found, kv_bytes=runs[0].kv_bytes)

    pairs = list(zip(apart, together, strict=True))
    return AloneRow(
        prompt_tokens=tokens,
        apart=median(apart),
        together=median(together),
        ttft_ratio=statistics.median(one.ttft / max(other.ttft, SHORTEST) for one, other in pairs),
        tpot_ratio=statistics.median(one.tpot / max(other.tpot, SHORTEST) for one, other in pairs),
    )


async def _one(service: Service, tokens: int, output: int, rng: random.Random) -> Request:
    began = time.perf_counter()
    moments, report = await _ask(service, tokens, output, rng)
    assert report is not None, "it came to its end"
    first, second, *_, last = moments
    return Request(
        ttft=first - began,
        prefill=report.prefill_s,
        handoff=report.handoff_s,
        second=second - first,
        tpot=(last - second) / (len(moments) - 2),
        kv_bytes=report.kv_bytes,
    )


async def _ask(
    service: Service,
    tokens: int,
    output: int,
    rng: random.Random,
    told: Callable[[float], object] = lambda moment: None,
) -> tuple[list[float], GenerationReport | None]:
    """A prompt that nobody has seen; when each token of the answer came."""
    prompt = tuple(rng.randrange(LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID) for _ in range(tokens))
    sampling = SamplingParams(temperature=0.0, max_tokens=output)
    moments: list[float] = []
    report: GenerationReport | None = None
    async with aclosing(service.generate(Generation(token_ids=prompt, sampling=sampling))) as outputs:
        async for each in outputs:
            now = time.perf_counter()
            told(now)
            moments += [now] * len(each.token_ids)
            report = each.report
    return moments, report


async def _loaded(
    stage: Stage, options: DisaggregationOptions, rng: random.Random, on_turn: OnTurn
) -> tuple[LoadRow, ...]:
    ways = {0: stage.apart, **stage.together}
    taken = {budget: _Load() for budget in ways}
    for turn in range(options.rounds):
        for budget in rng.sample([*ways], len(ways)):
            on_turn(f"load, {turn}, {budget or APART}")
            await _load(ways[budget], options, rng, taken[budget])
    return tuple(load_row(budget, seen, options.seconds * options.rounds) for budget, seen in taken.items())


def load_row(step_tokens: int, seen: _Load, seconds: float) -> LoadRow:
    """The figures of one way.

    Args:
        step_tokens: budget of a step of one engine that does both; 0 where they are apart.
        seen: under that load.
        seconds: of load.

    Raises:
        ConfigError: no stream had two tokens within them.
    """
    if not seen.gaps or not seen.quiet:
        raise ConfigError(
            f"no stream had two tokens in {seconds:g} s of load, or before: give it more", field="seconds"
        )
    ordered = sorted(seen.gaps)
    return LoadRow(
        way=TOGETHER if step_tokens else APART,
        step_tokens=step_tokens,
        gaps=latency(ordered),
        quiet=latency(seen.quiet),
        worst=ordered[-1],
        long_ttft=latency(seen.long) if seen.long else None,
        tokens_per_second=len(ordered) / seconds,
        step_gap=seen.steps.total / max(1, seen.steps.count),
        sample=tuple(ordered[len(ordered) * place // SAMPLES] for place in range(SAMPLES)),
    )


async def _load(service: Service, options: DisaggregationOptions, rng: random.Random, seen: _Load) -> None:
    """Streams that go on and on; after a while long prompts, one every so often, whatever became of the last."""
    taken: list[list[float]] = []

    async def stream() -> None:
        while True:
            # A stream's first token is no gap: it is another request's.
            taken.append([])
            await _ask(service, STREAM_PROMPT, STREAM_OUTPUT, rng, taken[-1].append)

    async def long() -> None:
        began = time.perf_counter()
        moments, _ = await _ask(service, options.long, options.output, rng)
        seen.long.append(moments[0] - began)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream()) for _ in range(options.streams)]
        while len(taken) < options.streams or not all(taken[: options.streams]):  # noqa: ASYNC110 -- sets no event
            await asyncio.sleep(0.01)
        quiet = time.perf_counter()
        await asyncio.sleep(QUIET)
        began = time.perf_counter()
        while time.perf_counter() - began < options.seconds:
            tasks.append(group.create_task(long()))
            await asyncio.sleep(options.interval)
        ended = time.perf_counter()
        for task in tasks:
            task.cancel()
    seen.steps = _step_gaps(service)
    for moments in taken:
        for before, after in pairwise(moments):
            if quiet <= before and after < began:
                seen.quiet.append(after - before)
            elif began <= before and after < ended:
                seen.gaps.append(after - before)


def _step_gaps(service: Service) -> Histogram:
    """Of the decode worker, as its last heartbeat told."""
    (load,) = (each["load"] for each in service.cluster()["workers"] if each["role"] == "decode")
    return msgspec.convert(load["step_gaps"], Histogram)
