"""Prefill and decode on the same workers, prompts in chunks beside the decode steps (Agrawal et al., 2024)."""

from __future__ import annotations

import math

import msgspec

from cluster.sizing.apart import MAX_WORKERS
from cluster.sizing.queue import crowded, mean_within, wait
from cluster.sizing.worker import SizedWorker
from cluster.sizing.workload import Workload

CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Prompt tokens beside a decode step, of which the best is taken."""
ROUNDS = 60
"""Of the fixed point between batch and time per token."""


class Together(msgspec.Struct, frozen=True, kw_only=True):
    """A count that meets the targets, and what comes of it. Times in seconds.

    Attributes:
        workers: devices in all.
        chunk: prompt tokens beside a decode step.
        ttft: at the workload's percentile.
        tpot: in the mean of a request.
        gap: longest between two tokens of a stream: a step with a prompt's last chunk, at the workload's percentile.
        mean_batch: sequences in a step in the mean.
    """

    workers: int
    chunk: int
    ttft: float
    tpot: float
    gap: float
    mean_batch: float


def together(worker: SizedWorker, load: Workload) -> Together | str:
    """The fewest workers that meet the targets, or why none do."""
    if worker.room <= 0:
        return "the weights do not fit a device"
    if not worker.concurrency(load.total_tokens):
        return "the KV of one request does not fit a device"
    found = [count for chunk in CHUNKS if (count := _fewest(worker, load, chunk)) is not None]
    if not found:
        return "no chunk keeps both targets: long ones hold up the streams, short ones the prompts"
    return min(found, key=lambda each: (each.workers, each.tpot))


def _fewest(worker: SizedWorker, load: Workload, chunk: int) -> Together | None:
    low, high = 1, 1
    while (found := _shared(worker, load, chunk, high)) is None:
        low, high = high + 1, 2 * high
        if high > MAX_WORKERS:
            return None
    while low < high:
        middle = (low + high) // 2
        fewer = _shared(worker, load, chunk, middle)
        if fewer is None:
            low = middle + 1
        else:
            found, high = fewer, middle
    return found


def _shared(worker: SizedWorker, load: Workload, chunk: int, workers: int) -> Together | None:
    """What comes of so many; None where a target is missed."""
    rate, context = load.rate / workers, load.mean_context
    chunks = math.ceil(load.prompt_tokens / chunk)
    size = math.ceil(load.prompt_tokens / chunks)
    most = mean_within(worker.concurrency(load.total_tokens), load.percentile)
    batch, tpot, mixed = 0.0, 0.0, 0.0
    for _ in range(ROUNDS):
        beside = round(batch)
        mixed = worker.step(batch=beside, context=context, chunk=size, cached=load.prompt_tokens // 2)
        busy = rate * chunks * mixed
        plain = worker.step(batch=max(beside, 1), context=context)
        if busy >= 1:
            return None
        tpot = 1 / (rate * chunks + (1 - busy) / plain)
        before, batch = batch, rate * load.decode_tokens * tpot
        if batch > most:
            return None
        if abs(batch - before) < 0.5:
            break
    ttft = chunks * mixed + wait(workers, load.rate, chunks * mixed, load.percentile)
    crowd = crowded(batch, load.percentile)
    gap = worker.step(batch=crowd, context=context, chunk=size, cached=load.prompt_tokens - size)
    if ttft > load.ttft or tpot > load.tpot or (load.gap and gap > load.gap):
        return None
    return Together(workers=workers, chunk=size, ttft=ttft, tpot=tpot, gap=gap, mean_batch=batch)
