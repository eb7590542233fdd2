"""``kvferry bench handoff``: two real processes with the workers' books, shells and sockets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from refusals import Refused

from cluster.bench.handoff.figures import HandoffReport, rows_of
from cluster.bench.handoff.measure import HandoffOptions, measure_handoff
from cluster.bench.handoff.prefill_side import Scene, staged
from cluster.bench.preset import layout_of
from protocol.errors import KVFerryError
from protocol.layout import KVLayout

COMMAND = (sys.executable, "-m", "cluster", "bench", "handoff")
LAYOUT = KVLayout(num_layers=2, kv_heads=1, head_dim=2, block_size=16)
PATIENCE = 120.0


def options(**changed: object) -> HandoffOptions:
    values: dict[str, object] = {"model": "smollm2-135m", "block_size": 16, "transports": ("shm",), "tokens": (16,)}
    values |= {"chunk": 512, "pause": 0.0, "runs": 1, "max_pool": 2 << 30, **changed}
    return HandoffOptions(**values)  # type: ignore[arg-type]


def bench(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


def test_a_short_run_gives_a_table_and_json(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = bench(
        *("--transports", "shm,tcp,inproc", "--tokens", "5,1000", "--pause", "0.001", "--runs", "3"),
        *("--json", str(file)),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(file.read_bytes(), type=HandoffReport)
    shape = [(row.transport, row.prompt_tokens, row.chunks) for row in report.rows]
    assert shape == [(name, *case) for name in ("shm", "tcp") for case in ((5, 1), (512, 1), (1000, 2))]
    for row in report.rows:
        assert row.latency.samples == 3
        assert 0 < row.latency.p50 <= row.latency.p99
        assert (row.of_one_chunk is not None) == (row.chunks > 1)
        assert row.nbytes == -(-row.prompt_tokens // 16) * 16 * 23_040
    assert list(report.skipped) == ["inproc"]
    assert "of one chunk" in done.stdout
    assert "* skipped inproc: " in done.stdout


async def test_the_bytes_are_compared_and_every_block_comes_back() -> None:
    layout = layout_of("smollm2-135m", block_size=16)
    # Room for one prompt: a block that was not given back would be missed by the next.
    scene = Scene("shm", "", layout, layout.blocks_for(256) + 2, 64, 0.0)
    async with staged(scene) as side:
        children = psutil.Process().children()
        for _ in range(5):
            assert 0 < await side.hand_over(256, checked=True) < PATIENCE
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


async def test_a_decode_side_that_dies_is_told() -> None:
    layout = layout_of("smollm2-135m", block_size=16)
    async with staged(Scene("tcp", "", layout, 32, 64, 0.0)) as side:
        for child in psutil.Process().children():
            child.kill()
        with pytest.raises(KVFerryError, match="has ended"):
            await side.hand_over(16)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"transports": ("pigeon",)}, "no transport 'pigeon'; known: cuda_ipc, "),
        ({"chunk": 100}, "chunk must be whole blocks of 16 tokens, got 100"),
        ({"tokens": (16, 0)}, r"tokens must lie in \[1, 131072\], got 0"),
        ({"model": "llama-3-8b", "tokens": (128 << 10,)}, r"more than --max-pool allows \(2048 MiB\)"),
    ],
)
async def test_a_value_that_cannot_be_is_named(changed: dict[str, object], said: str) -> None:
    with pytest.raises(KVFerryError, match=said):
        await measure_handoff(options(**changed), lambda *_: None)


def test_an_option_that_cannot_be_is_one_line(refused: Refused) -> None:
    done = refused("bench", "handoff", "--chunk", "100")
    assert done.status == 1
    assert done.err == "kvferry: chunk must be whole blocks of 16 tokens, got 100\n"


def test_prompts_of_several_chunks_are_held_against_one_chunk() -> None:
    found = {16: (1.0, 1.0, 1.0), 64: (1.0, 2.0, 4.0), 200: (2.0, 6.0, 8.0)}
    rows = rows_of("shm", LAYOUT, 64, found)
    assert [(row.prompt_tokens, row.chunks, row.of_one_chunk) for row in rows] == [
        (16, 1, None),
        (64, 1, None),
        (200, 4, 2.0),
    ]


def test_the_length_of_one_chunk_is_measured_where_it_is_needed() -> None:
    assert options(tokens=(512, 16, 16)).lengths() == (16, 512)
    assert options(tokens=(4096,)).lengths() == (512, 4096)
