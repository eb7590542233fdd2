"""The picture of a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from cluster.bench.case import Case
from cluster.bench.machine import Machine
from cluster.bench.picture import SUFFIXES, check_plot
from cluster.bench.plot import series, write_plot
from cluster.bench.report import Measured, Outcome, Report, Settings, outcome_table, remarks
from cluster.bench.rivals.contest import RivalFigure, RivalState
from cluster.bench.statistics import latency
from protocol.errors import ConfigError
from protocol.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, kv_heads=1, head_dim=2, block_size=16)


def outcome(tokens: int, transport: str = "tcp", *rivals: RivalFigure) -> Outcome:
    case = Case(transport=transport, tokens=tokens, table="scattered", way="whole", concurrency=1)
    measured = Measured(
        blocks=tokens // 16,
        nbytes=tokens * LAYOUT.bytes_per_token,
        rounds=3,
        latency=latency([0.001, 0.002, 0.004]),
        gb_per_s=1.0,
        limit="socket",
        limit_gb_per_s=2.0,
        ratio=0.5,
        rivals=rivals,
    )
    return Outcome(case=case, state="measured", measured=measured)


def report(*outcomes: Outcome, complete: bool = True, rivals: tuple[RivalState, ...] = ()) -> Report:
    return Report(
        kvferry="0",
        machine=Machine(system="s", processor="p", cores=2, memory_bytes=1, python="3"),
        model="<m>",
        layout=LAYOUT,
        block_bytes=LAYOUT.block_bytes,
        settings=Settings(seconds=1.0, time_limit=1.0, streams=1, seed=0, max_pool=1, two_machines=False),
        limits={"socket": "a <b>", "memcpy": "unused"},
        rivals=rivals,
        outcomes=outcomes,
        complete=complete,
    )


SKIPPED = tuple(
    Outcome(
        case=Case(transport="shm", tokens=tokens, table="scattered", way="whole", concurrency=1),
        state="skipped",
        reason="no",
    )
    for tokens in (16, 32)
)


def test_a_line_is_of_one_kind_by_growing_size() -> None:
    found = series(report(outcome(64), outcome(16), outcome(16, "shm"), *SKIPPED))
    assert {name: [point.blocks for point in points] for name, points in found.items()} == {
        "tcp, scattered, whole, 1 at once": [1, 4],
        "shm, scattered, whole, 1 at once": [1],
    }


MET = RivalFigure(rival="nixl", mode="READ", latency=latency([0.002]), gb_per_s=0.5, ratio=2.25)
STATES = (
    RivalState(rival="nixl", version="1.5", settings="how"),
    RivalState(rival="nixl", version="1.5", settings="how"),
    RivalState(rival="mooncake", reason="mooncake is not installed"),
)


def test_a_rival_has_a_column_and_a_remark() -> None:
    found = report(outcome(16, "tcp", MET), outcome(32), rivals=STATES)
    table = outcome_table(found)
    assert table.columns[-1].header == "/nixl"
    assert list(table.columns[-1].cells) == ["2.25", "-"]
    said = remarks(found)
    assert said.count("/nixl: our speed over that of nixl 1.5, how") == 1
    assert said.count("vs mooncake: mooncake is not installed") == 1


def test_remarks_name_what_the_table_needs_and_each_reason_once() -> None:
    said = remarks(report(outcome(16), *SKIPPED, complete=False))
    assert said[0] == "limit socket: a <b>"
    assert said.count("skipped shm: no") == 1
    assert not any("unused" in line for line in said)
    assert said[-1].startswith("cut short")


def test_a_plot_needs_a_known_ending_and_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"\.html, \.png, \.svg, got 'x\.gif'"):
        check_plot(Path("x.gif"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="extra 'plot'"):
        write_plot(report(outcome(16)), tmp_path / "x.png")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_plot_is_written(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    file = tmp_path / f"x{suffix}"
    write_plot(report(outcome(16, "tcp", MET), outcome(64), outcome(16, "shm"), *SKIPPED), file)
    content = file.read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
    else:
        assert b"<svg" in content
    if suffix == ".html":
        assert b"<!-- nixl -->" in content
        assert b"a &lt;b&gt;" in content
        assert b"http-equiv" not in content
        assert b"<script" not in content


def test_an_unwritable_plot_is_an_error_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    with pytest.raises(ConfigError, match="plot: cannot write"):
        write_plot(report(), tmp_path / "missing" / "x.svg")
