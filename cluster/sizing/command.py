"""``kvferry plan``: how many workers a load needs, before any machine is bought."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from cluster.sizing.verdict import SizingPlan
    from engine.models.config import ModelConfig

REMARKS = (
    "steps by the roofline of their device, at the share of its rates that an engine reaches; nothing was run",
    "requests come at random and are all alike; prompts share no prefix",
    "a model must fit one device: there is no tensor parallelism",
)


def plan_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A config.json, the directory that it is in, or a known name.")
    ],
    gpu: Annotated[str, typer.Option(help="a100, h100, h200, b200, l40s, mi300x; cpu: this one, measured.")] = "h100",
    decode_gpu: Annotated[str | None, typer.Option(help="Of the decode workers, where it is another.")] = None,
    prompt: Annotated[str, typer.Option(help="Tokens of a prompt, such as 4k.")] = "2k",
    output: Annotated[str, typer.Option(help="Tokens of an answer.")] = "256",
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 10.0,
    ttft: Annotated[float, typer.Option(help="Seconds to the first token at most.")] = 1.0,
    tpot: Annotated[float, typer.Option(help="Seconds per further token at most, in the mean.")] = 0.05,
    gap: Annotated[float, typer.Option(help="Seconds between two tokens at most; 0: no bound.")] = 0.0,
    percentile: Annotated[float, typer.Option(help="Share of the requests that shall meet them.")] = 0.99,
    link: Annotated[
        str, typer.Option(help="nvlink, pcie5, rdma-400, rdma-200, tcp-100, tcp-25, tcp-10, or such as 50gbps.")
    ] = "rdma-200",
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16, float16, float32.")] = "bfloat16",
    kv_dtype: Annotated[str | None, typer.Option(help="Of the KV cache, where it is another: float8_e4m3.")] = None,
    chunk: Annotated[str, typer.Option(help="Prompt tokens that a prefill step computes.")] = "8k",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell how many workers a load needs, and whether prefill and decode apart pay."""
    from cluster.bench.case import parse_count
    from cluster.bench.output import standard_output, tell
    from cluster.display import print_json
    from cluster.sizing.accelerator import accelerator
    from cluster.sizing.link import link as link_of
    from cluster.sizing.model import ServedModel
    from cluster.sizing.verdict import plan
    from cluster.sizing.workload import Workload
    from protocol.errors import ConfigError
    from protocol.layout import FLOAT8, ITEMSIZE

    if dtype not in ITEMSIZE or dtype in FLOAT8:
        raise ConfigError(f"dtype must be bfloat16, float16 or float32, got {dtype!r}", field="dtype")
    step_tokens = parse_count(chunk, field="chunk")
    if step_tokens < 1:
        raise ConfigError(f"chunk must be at least 1, got {chunk!r}", field="chunk")
    load = Workload(
        prompt_tokens=parse_count(prompt, field="prompt"),
        output_tokens=parse_count(output, field="output"),
        rate=rate,
        ttft=ttft,
        tpot=tpot,
        gap=gap,
        percentile=percentile,
    )
    served = ServedModel.of(geometry(model), dtype=dtype, cache_dtype=kv_dtype or dtype)
    over, prefill = link_of(link), accelerator(gpu, dtype)
    decode = prefill if decode_gpu in (None, gpu) else accelerator(str(decode_gpu), dtype)
    found = plan(served, prefill, decode, load, over, chunk=step_tokens)
    if as_json:
        print_json(found)
        return
    where = found.prefill_device if prefill is decode else f"{found.prefill_device}, {found.decode_device}"
    answer = {True: "prefill and decode apart pay", False: "together is enough", None: "no number of workers will do"}
    tell(standard_output(), f"{model} on {where}: {answer[found.pays]}", plan_table(found), found.reasons + REMARKS)


def geometry(model: str) -> ModelConfig:
    """The geometry that ``model`` names; nothing is fetched.

    Raises:
        ConfigError: it is neither a directory nor a file nor a known model that has been fetched.
        CheckpointUnavailable, UnsupportedArchitecture: its ``config.json`` cannot be served.
    """
    from cluster.model_store import KNOWN_MODELS, model_directory
    from engine.models.config import ModelConfig
    from protocol.errors import ConfigError

    path = model_directory(model) if model in KNOWN_MODELS else Path(model).expanduser()
    directory = path.parent if path.is_file() and path.name == "config.json" else path
    if not directory.is_dir():
        hint = f"; fetch it with `kvferry model get {model}`" if model in KNOWN_MODELS else ""
        raise ConfigError(f"model {model!r} is neither a config.json nor a directory with one{hint}", field="model")
    return ModelConfig.read(directory)


def plan_table(plan: SizingPlan) -> Table:
    """The figures, one a row."""
    from rich.table import Table

    from cluster.display import binary

    table = Table("what", "how much", box=None, pad_edge=False)
    rows = [
        ("parameters", f"{plan.parameters / 1e9:.3g} billion, {binary(plan.weight_bytes)}"),
        ("KV of a token", binary(plan.kv_bytes_per_token)),
        ("KV of a request", binary(plan.kv_bytes_per_request)),
        ("room for KV beside the weights", binary(plan.kv_room) if plan.kv_room > 0 else "none: they do not fit"),
        ("requests that fit at once", str(plan.concurrency)),
        ("prefill of a prompt", _ms(plan.prefill_seconds)),
        ("decode step of one sequence", _ms(plan.step_seconds)),
        ("decode step of all that fit", _ms(plan.full_step_seconds) if plan.concurrency else "-"),
    ]
    rows += [
        (f"KV of a prompt by {each.link}", f"{_ms(each.seconds)}, of it not hidden {_ms(each.exposed)}")
        for each in plan.crossings
    ]
    if plan.apart is not None:
        split = plan.apart
        rows.append(("apart", f"{split.prefill} prefill, {split.decode} decode"))
        rows.append(
            ("", f"TTFT {_ms(split.ttft)}, TPOT {_ms(split.tpot)}, batch {split.mean_batch:.0f} of {split.batch}")
        )
    if plan.together is not None:
        whole = plan.together
        rows.append(("together", f"{whole.workers}, with chunks of {whole.chunk} tokens"))
        rows.append(("", f"TTFT {_ms(whole.ttft)}, TPOT {_ms(whole.tpot)}, longest gap {_ms(whole.gap)}"))
    for row in rows:
        table.add_row(*row)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
