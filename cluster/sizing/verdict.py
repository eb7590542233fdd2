"""The whole plan: what fits, how long things take, how many workers either way needs, and which of the two pays."""

from __future__ import annotations

import msgspec

from cluster.config import TransferSection
from cluster.sizing.accelerator import Accelerator
from cluster.sizing.apart import Apart, apart
from cluster.sizing.link import LINKS, Link
from cluster.sizing.model import ServedModel
from cluster.sizing.together import Together, together
from cluster.sizing.worker import SizedWorker
from cluster.sizing.workload import Workload


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's KV over one link.

    Attributes:
        link: its name.
        seconds: from the first byte to the last.
        exposed: what of it is left when prefill has ended: chunks cross while later ones are computed.
    """

    link: str
    seconds: float
    exposed: float


class SizingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, seconds and counts.

    Attributes:
        prefill_device, decode_device: names.
        parameters, weight_bytes: of the model.
        kv_bytes_per_token: over all layers.
        kv_bytes_per_request: at its end, in whole blocks.
        kv_room: bytes for KV on a decode device, beside the weights; negative where these do not fit.
        concurrency: requests that fit at once.
        prefill_seconds: of a prompt alone.
        step_seconds: of a decode step of one sequence.
        full_step_seconds: of one with all that fit.
        crossings: of the prompt's KV, by link.
        apart: with prefill and decode on workers of their own, over the chosen link; None where no count will do.
        together: with both on the same; None where no count will do.
        pays: whether apart is worth it; None where neither will do.
        reasons: why, and what keeps either way from doing it.
    """

    prefill_device: str
    decode_device: str
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_request: int
    kv_room: int
    concurrency: int
    prefill_seconds: float
    step_seconds: float
    full_step_seconds: float
    crossings: tuple[Crossing, ...]
    apart: Apart | None
    together: Together | None
    pays: bool | None
    reasons: tuple[str, ...]


def plan(
    model: ServedModel, prefill: Accelerator, decode: Accelerator, load: Workload, over: Link, *, chunk: int
) -> SizingPlan:
    """How many workers ``load`` needs, and what their work takes.

    Args:
        model: that is served.
        prefill: the device of the prefill workers.
        decode: that of the decode workers, and of those that do both.
        load: requests and targets.
        over: the link between the two.
        chunk: prompt tokens that a prefill step computes.
    """
    prefiller, decoder = SizedWorker(model, prefill, chunk), SizedWorker(model, decode, chunk)
    fit = decoder.concurrency(load.total_tokens)
    split, whole = apart(prefiller, decoder, load, over), together(decoder, load)
    pays, reasons = judge(split, whole)
    links = {each.name: each for each in (over, *LINKS.values())}
    return SizingPlan(
        prefill_device=prefill.name,
        decode_device=decode.name,
        parameters=model.parameters,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=model.layout.bytes_per_token,
        kv_bytes_per_request=model.request_bytes(load.total_tokens),
        kv_room=decoder.room,
        concurrency=fit,
        prefill_seconds=prefiller.prefill(load.prompt_tokens),
        step_seconds=decoder.step(batch=1, context=load.mean_context),
        full_step_seconds=decoder.step(batch=max(fit, 1), context=load.mean_context),
        crossings=tuple(crossing(prefiller, load.prompt_tokens, each) for each in links.values()),
        apart=split if isinstance(split, Apart) else None,
        together=whole if isinstance(whole, Together) else None,
        pays=pays,
        reasons=reasons,
    )


def crossing(worker: SizedWorker, tokens: int, over: Link) -> Crossing:
    """What it takes to ship a prompt's KV: chunks cross while the next compute, of the last one ranges of layers."""
    seconds = worker.model.request_bytes(tokens) / over.rate
    last = tokens % worker.chunk or min(worker.chunk, tokens)
    layers = worker.model.config.num_layers
    share = min(TransferSection().layers_per_ship or layers, layers) / layers
    tail = share * worker.model.request_bytes(last) / over.rate
    computed = worker.prefill(tokens) - share * worker.step(chunk=last, cached=tokens - last)
    return Crossing(link=over.name, seconds=seconds, exposed=max(tail, seconds - computed))


def judge(split: Apart | str, whole: Together | str) -> tuple[bool | None, tuple[str, ...]]:
    """Whether prefill and decode apart pay, and why."""
    if isinstance(split, str):
        reasons = [f"apart: {split}"]
        if isinstance(whole, str):
            return None, (*reasons, f"together: {whole}")
        return False, (*reasons, f"together does it with {whole.workers}")
    reasons = ["the link, not the devices, asks for that many workers"] if split.link_bound else []
    if isinstance(whole, str):
        return True, (f"together: {whole}", *reasons)
    counts = f"{split.workers} workers apart, {whole.workers} together"
    gaps = f"the longest gap between tokens is {split.tpot * 1e3:.1f} ms apart, {whole.gap * 1e3:.1f} ms together"
    return split.workers < whole.workers, (counts, gaps, *reasons)
