"""The whole suite's run: several sessions at once, as ``scripts/checks.sh`` starts them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS.parent / "scripts" / "checks.sh"
HANGS = """
import ctypes, signal

def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.CDLL(None).pause()
"""
CRASHES = """
import os

def test_crashes():
    os._exit(0)
"""
STARTS_NODES = "pytestmark = [pytest.mark." + "ray]"
ALONE = STARTS_NODES.replace("]", ", pytest.mark.serial]")
PASSES = """
import os, pytest
{mark}

@pytest.mark.parametrize("number", range(4))
def test_passes(number, request):
    with open({log!r}, "a") as log:
        print({name!r}, os.environ["PYTEST_XDIST_WORKER"], request.config.option.fault_seed, file=log)
"""

HAS_ITS_TURN = """
import fcntl, os, pytest

@pytest.mark.{mark}
@pytest.mark.parametrize("number", range(4))
def test_has_its_turn(number, request):
    with open(os.path.join(request.config.workerinput["turns"], "hall")) as hall:
        for kind, free in ((fcntl.LOCK_SH, {shared}), (fcntl.LOCK_EX, False)):
            try:
                fcntl.flock(hall, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                assert not free
            else:
                assert free
"""


def flags() -> list[str]:
    """What the script gives pytest, but for the number of sessions."""
    (found,) = re.findall(
        r'^exec "\$BIN/pytest" -n "\$\(\(CORES \+ 1\)\)" (.*) "\$@"$',
        SCRIPT.read_text().replace("\\\n", ""),
        re.MULTILINE,
    )
    return shlex.split(found)


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The tests of a folder in two sessions, by the script's flags but for the seed."""
    given = [flag for flag in flags() if not flag.startswith("--fault-seed")]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", *given, "-n", "2", *more, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_tests_of_a_file_and_all_that_start_nodes_stay_together(tmp_path: Path) -> None:
    log = tmp_path / "log"
    marks = {"plain": "", "other": "", "alone": ALONE, "node": STARTS_NODES, "up": STARTS_NODES}
    for name, mark in marks.items():
        (tmp_path / f"test_{name}.py").write_text(PASSES.format(mark=mark, name=name, log=str(log)))
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 passed" in done.stdout
    workers: dict[str, set[str]] = {}
    seeds = set()
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [name for name, *_ in lines if marks[name]][-4:] == ["alone"] * 4, "when no slow test is left elsewhere"
    for name, worker, seed in lines:
        seeds.add(f"faults: --fault-seed {seed}")
        workers.setdefault("ray" if marks[name] else name, set()).add(worker)
    assert {name: len(found) for name, found in workers.items()} == {"plain": 1, "other": 1, "ray": 1}
    assert len(seeds) == 1
    assert seeds <= {*done.stdout.splitlines()}


def test_a_serial_test_has_the_hall_for_itself_and_slow_ones_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    for mark, shared in (("serial", False), ("slow", True)):
        (tmp_path / f"test_{mark}.py").write_text(HAS_ITS_TURN.format(mark=mark, shared=shared))
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout
    assert not [*folder.glob("kvferry-turns-*")]


@pytest.mark.parametrize("source", [CRASHES, HANGS], ids=["crashes", "hangs"])
def test_a_session_that_ends_or_hangs_fails_the_run(tmp_path: Path, source: str) -> None:
    (tmp_path / "test_one.py").write_text(source)
    (tmp_path / "test_two.py").write_text(PASSES.format(mark="", name="two", log=str(tmp_path / "log")))
    done = run(tmp_path, "-o", "faulthandler_timeout=5")
    assert done.returncode != 0
    assert "FAILED test_one.py::test_" in done.stdout, done.stdout + done.stderr
