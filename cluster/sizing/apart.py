"""Prefill and decode on workers of their own: how many of each."""

from __future__ import annotations

import math

import msgspec

from cluster.sizing.link import Link
from cluster.sizing.queue import crowded, fewest, mean_within, wait
from cluster.sizing.worker import SizedWorker
from cluster.sizing.workload import Workload

MAX_WORKERS = 100_000


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """Counts that meet the targets, and what comes of them. Times in seconds.

    Attributes:
        prefill, decode: workers of each role.
        ttft: at the workload's percentile.
        tpot: of a decode step, which is also the gap between two tokens, at the workload's percentile.
        batch: sequences in a decode worker's step that its target, or its memory, allows at most.
        mean_batch: sequences in it in the mean.
        link_bound: whether one of the counts is what the link asks for, not the devices.
    """

    prefill: int
    decode: int
    ttft: float
    tpot: float
    batch: int
    mean_batch: float
    link_bound: bool

    @property
    def workers(self) -> int:
        """Devices in all."""
        return self.prefill + self.decode


def apart(prefiller: SizedWorker, decoder: SizedWorker, load: Workload, link: Link) -> Apart | str:
    """The fewest workers of each role that meet the targets, or why none do."""
    service = prefiller.prefill(load.prompt_tokens)
    if prefiller.room <= 0 or decoder.room <= 0:
        return "the weights do not fit a device"
    if not prefiller.concurrency(load.prompt_tokens) or not decoder.concurrency(load.total_tokens):
        return "the KV of one request does not fit a device"
    if service > load.ttft:
        return f"prefill alone takes {service:.3g} s, longer than the target for the first token"
    limit = min(load.tpot, load.gap or math.inf)
    batch = decoder.widest(load.mean_context, load.total_tokens, limit)
    if not batch:
        alone = decoder.step(batch=1, context=load.mean_context)
        return f"a decode step of one sequence takes {alone:.3g} s, longer than the target per token"
    crossing = load.rate * prefiller.model.request_bytes(load.prompt_tokens) / link.rate
    prefill = fewest(load.rate, service, load.ttft, load.percentile, MAX_WORKERS)
    mean = mean_within(batch, load.percentile)
    per_worker = mean / decoder.step(batch=max(round(mean), 1), context=load.mean_context)
    decode = max(math.ceil(load.rate * load.decode_tokens / per_worker), 1)
    by_link = max(math.ceil(crossing), 1)
    link_bound = by_link > min(prefill, decode)
    if max(prefill, decode, by_link) > MAX_WORKERS:
        return f"it would take more than {MAX_WORKERS} workers"
    prefill, decode = max(prefill, by_link), max(decode, by_link)
    mean = decoder.crowd(load.mean_context, load.rate * load.decode_tokens / decode)
    crowd = min(crowded(mean, load.percentile), batch)
    return Apart(
        prefill=prefill,
        decode=decode,
        ttft=service + wait(prefill, load.rate, service, load.percentile),
        tpot=decoder.step(batch=crowd, context=load.mean_context),
        batch=batch,
        mean_batch=mean,
        link_bound=link_bound,
    )
