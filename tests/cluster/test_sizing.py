"""``kvferry plan``: the arithmetic of the literature, queues against a simulation, counts that are the least."""

from __future__ import annotations

import heapq
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import Refused
from typer.testing import CliRunner

from cluster.bench.engine.case import EngineCase
from cluster.bench.engine.work import work_of
from cluster.cli import app
from cluster.sizing.accelerator import PRESETS, Accelerator, accelerator
from cluster.sizing.apart import Apart, apart
from cluster.sizing.link import LINKS, link
from cluster.sizing.model import ServedModel
from cluster.sizing.queue import crowded, erlang_c, mean_within, wait
from cluster.sizing.together import Together, together
from cluster.sizing.verdict import SizingPlan, crossing, plan
from cluster.sizing.worker import SizedWorker
from cluster.sizing.workload import Workload
from engine.models.config import ModelConfig
from protocol.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
LARGE = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "num_local_experts": 8}
SMALL = LLAMA | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
H100, RDMA = PRESETS["h100"], LINKS["rdma-200"]


def model(raw: dict[str, Any] = LLAMA, dtype: str = "bfloat16", **changed: Any) -> ServedModel:
    return ServedModel.of(ModelConfig.parse(raw), dtype=dtype, cache_dtype=changed.get("cache_dtype", dtype))


def worker(raw: dict[str, Any] = LLAMA, device: Accelerator = H100, chunk: int = 8192) -> SizedWorker:
    return SizedWorker(model(raw), device, chunk)


def load(**changed: Any) -> Workload:
    values: dict[str, Any] = {"prompt_tokens": 4096, "output_tokens": 256, "rate": 10.0, "ttft": 1.0, "tpot": 0.05}
    return Workload(**values | changed)


def planned(changed: dict[str, Any] | None = None, over: str = "rdma-200") -> SizingPlan:
    return plan(model(), H100, H100, load(**changed or {}), link(over), chunk=8192)


@pytest.mark.parametrize(
    ("raw", "parameters"),
    [(SMALL, 134_515_008), (LLAMA, 8_030_261_248), (LARGE, 70_553_706_496), (MIXTRAL, 46_702_792_704)],
    ids=["SmolLM2-135M", "Llama-3-8B", "Llama-3-70B", "Mixtral-8x7B"],
)
def test_parameters_are_those_that_were_published(raw: dict[str, Any], parameters: int) -> None:
    assert model(raw).parameters == parameters
    assert model(raw, "float32").weight_bytes == 4 * parameters


def test_kv_bytes_are_those_of_the_literature() -> None:
    assert model(LARGE, "float16").request_bytes(4096) == 1_342_177_280
    assert model(LARGE, "float16", cache_dtype="float8_e4m3").request_bytes(4096) == 671_088_640
    assert model().layout.bytes_per_token == 128 << 10
    assert model().request_bytes(17) == 2 * 16 * (128 << 10), "whole blocks"


@pytest.mark.parametrize("raw", [LLAMA, SMALL], ids=["8B", "135M"])
@pytest.mark.parametrize(("kind", "batch", "context"), [("decode", 7, 900), ("prefill", 1, 900)])
def test_a_step_is_the_work_that_the_benchmark_of_the_engine_counts(
    raw: dict[str, Any], kind: Any, batch: int, context: int
) -> None:
    steps = {"batch": batch, "context": context} if kind == "decode" else {"chunk": context}
    parts = model(raw).work(**steps)
    counted = work_of(EngineCase(kind=kind, batch=batch, context=context), ModelConfig.parse(raw), 2, 2)
    assert (sum(part.nbytes for part in parts), sum(part.flops for part in parts)) == counted


def test_a_prompt_takes_two_operations_per_weight_and_token() -> None:
    flops = 2 * 4096 * model().active_parameters
    assert model().work(chunk=4096)[0].flops == pytest.approx(flops, rel=0.001)
    seconds = worker().prefill(4096)
    assert flops / (989.4e12 * 0.5) < seconds < 1.1 * flops / (989.4e12 * 0.5), "attention is the rest"


def test_a_decode_step_takes_the_weights_and_the_kv_over_the_bandwidth() -> None:
    weights, rate = (8_030_261_248 - 128256 * 4096) * 2, 3.35e12 * 0.7
    alone = worker().step(batch=1, context=1)
    assert alone == pytest.approx(weights / rate, rel=0.01)
    kv = 32 * 4096 * (128 << 10)
    assert worker().step(batch=32, context=4096) - alone == pytest.approx(kv / rate, rel=0.02)


def test_few_tokens_read_few_experts_and_many_read_all() -> None:
    one, many = (model(MIXTRAL).work(batch=batch, context=1)[0].nbytes for batch in (1, 1000))
    expert = 3 * 4096 * 14336 * 2 * 32
    assert many - one == pytest.approx(6 * expert, rel=0.001)


def test_a_prompt_in_chunks_takes_longer_and_computes_the_same() -> None:
    short, long = worker(chunk=512).prefill(4096), worker().prefill(4096)
    assert long < short < 1.5 * long


def test_what_fits_is_what_the_weights_leave() -> None:
    found = worker()
    assert found.room == int(80e9 * 0.9) - 2 * 8_030_261_248
    count = found.concurrency(4352)
    assert count * found.model.request_bytes(4352) <= found.room < (count + 1) * found.model.request_bytes(4352)
    assert worker(LARGE).concurrency(4352) == 0


@pytest.mark.parametrize("load_share", [0.1, 0.5, 0.9])
def test_the_chance_to_wait_is_erlangs(load_share: float) -> None:
    assert erlang_c(1, load_share) == pytest.approx(load_share)
    two = 2 * load_share
    assert erlang_c(2, two) == pytest.approx(two**2 / (2 + two), rel=1e-9)


@pytest.mark.parametrize(("servers", "share"), [(1, 0.7), (3, 0.8), (8, 0.9)])
def test_waits_are_those_of_a_simulation(servers: int, share: float) -> None:
    draw, service = random.Random(7), 0.2
    rate = share * servers / service
    free, now, waits = [0.0] * servers, 0.0, []
    for _ in range(60_000):
        now += draw.expovariate(rate)
        begin = max(now, heapq.heappop(free))
        heapq.heappush(free, begin + service)
        waits.append(begin - now)
    measured = sorted(waits)[int(0.99 * len(waits))]
    assert wait(servers, rate, service, 0.99) == pytest.approx(measured, rel=0.25)


def test_a_queue_that_gets_more_than_it_can_do_never_ends() -> None:
    assert math.isinf(wait(2, 10.0, 0.2, 0.99))
    assert wait(4, 0.1, 0.2, 0.99) == 0.0


@given(mean=st.floats(0.1, 1000), percentile=st.sampled_from([0.5, 0.9, 0.99]))
def test_a_crowd_stays_within_what_its_mean_was_chosen_for(mean: float, percentile: float) -> None:
    most = crowded(mean, percentile)
    assert mean <= mean_within(most, percentile) + 1e-6
    assert crowded(mean_within(most, percentile) * 0.999, percentile) <= most


@given(rate=st.floats(0.1, 2000), prompt=st.integers(16, 8000), output=st.integers(1, 2000), ttft=st.floats(0.3, 10))
def test_counts_are_the_least_and_grow_with_the_load(rate: float, prompt: int, output: int, ttft: float) -> None:
    asked = load(rate=rate, prompt_tokens=prompt, output_tokens=output, ttft=ttft)
    found = apart(worker(), worker(), asked, link("100000gbps"))
    assert isinstance(found, Apart)
    service = worker().prefill(prompt)
    assert found.ttft <= ttft
    assert service + wait(found.prefill - 1, rate, service, 0.99) > ttft if found.prefill > 1 else True
    assert found.tpot <= 0.05
    assert found.mean_batch * worker().model.request_bytes(prompt + output) <= worker().room
    more = apart(worker(), worker(), load(rate=2 * rate, prompt_tokens=prompt, output_tokens=output, ttft=ttft), RDMA)
    assert isinstance(more, Apart)
    assert more.prefill >= found.prefill
    assert more.decode >= found.decode


def test_a_slow_link_asks_for_more_of_them() -> None:
    slow = apart(worker(), worker(), load(rate=40), link("tcp-10"))
    assert isinstance(slow, Apart)
    assert slow.link_bound
    assert min(slow.prefill, slow.decode) == math.ceil(40 * worker().model.request_bytes(4096) / link("tcp-10").rate)


@given(rate=st.floats(0.1, 500), gap=st.sampled_from([0.0, 0.02, 0.1]))
def test_together_keeps_its_targets_with_the_fewest(rate: float, gap: float) -> None:
    found = together(worker(), load(rate=rate, gap=gap))
    assert isinstance(found, Together)
    assert found.ttft <= 1.0
    assert found.tpot <= 0.05
    assert not gap or found.gap <= gap
    assert rate / found.workers * worker().prefill(4096) < 1.0


@pytest.mark.parametrize(
    ("changed", "pays"),
    [
        ({"rate": 0.5}, False),
        ({"gap": 0.0075, "tpot": 0.0075, "rate": 1.0}, True),
        ({"ttft": 0.01}, None),
    ],
    ids=["little load", "no chunk may stand between two tokens", "no device is so fast"],
)
def test_whether_it_pays_is_said_with_reasons(changed: dict[str, Any], pays: bool | None) -> None:
    found = planned(changed)
    assert found.pays is pays
    assert found.reasons


def test_what_a_link_leaves_to_wait_for_is_what_chunks_do_not_hide() -> None:
    fast = crossing(worker(chunk=512), 4096, link("nvlink"))
    slow = crossing(worker(chunk=512), 4096, link("tcp-10"))
    assert fast.exposed == pytest.approx(fast.seconds * 512 / 4096 * 15 / 32)
    assert slow.exposed > 0.5 * slow.seconds
    assert slow.seconds == pytest.approx(model().request_bytes(4096) / 1e9)


@pytest.mark.parametrize("raw", [LARGE], ids=["70B"])
def test_what_does_not_fit_is_said(raw: dict[str, Any]) -> None:
    found = plan(model(raw), H100, H100, load(), RDMA, chunk=8192)
    assert (found.apart, found.together, found.pays, found.concurrency) == (None, None, None, 0)
    assert all("do not fit a device" in reason for reason in found.reasons)


def test_this_machine_is_measured() -> None:
    here = accelerator("cpu", "float32")
    assert 1e8 < here.flops < 1e15
    assert 1e8 < here.bandwidth < 1e13


@pytest.mark.parametrize(
    ("field", "value"),
    [("rate", 0.0), ("ttft", math.nan), ("tpot", -1.0), ("gap", math.inf), ("percentile", 1.0), ("prompt_tokens", 0)],
)
def test_a_load_that_is_none_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be"):
        load(**{field: value})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_the_command_prints_a_table_and_json(checkpoint: Path) -> None:
    asked = ["plan", str(checkpoint / "config.json"), "--prompt", "4k", "--rate", "40"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    assert "KV of a request" in shown.stdout
    assert "544.0 MiB" in shown.stdout
    figures = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert figures["kv_bytes_per_token"] == 128 << 10
    assert figures["apart"]["prefill"] >= 40 * figures["prefill_seconds"]
    other = json.loads(CliRunner().invoke(app, [*asked, "--json", "--decode-gpu", "h200"]).stdout)
    assert other["decode_device"] == PRESETS["h200"].name
    assert other["apart"]["decode"] < figures["apart"]["decode"]


def test_the_readmes_command_runs() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (command,) = re.findall(r"`kvferry (plan [^`]+)`", readme)
    shown = CliRunner().invoke(app, command.split())
    assert shown.exit_code == 0, shown.output
    assert "22.5 KiB" in shown.stdout


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--gpu", "k80", "device 'k80' is not known; known: a100"),
        ("--link", "string", "link must be a rate"),
        ("--link", "0gbps", "link must be a rate"),
        ("--dtype", "float8_e4m3", "dtype must be"),
        ("--kv-dtype", "int4", "dtype must be one of"),
        ("--prompt", "many", "prompt must be a number"),
        ("--chunk", "0", "chunk must be at least 1"),
        ("--rate", "-1", "rate must be over 0"),
    ],
)
def test_a_wrong_option_is_named(refused: Refused, checkpoint: Path, option: str, value: str, named: str) -> None:
    assert named in refused("plan", str(checkpoint), option, value).err


def test_a_model_that_is_not_there_is_named(refused: Refused) -> None:
    assert "neither a config.json nor a directory" in refused("plan", "no-such-model").err
