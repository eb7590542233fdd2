"""deploy/systemd: units that systemd takes without a complaint, and that run commands that there are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cluster.cli import app

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "kvferry@.service"
PROGRAM = "/opt/kvferry/bin/kvferry"


def values(name: str) -> list[str]:
    lines = UNIT.read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]


def test_it_runs_commands_that_there_are() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for line in (*values("ExecStart"), *values("ExecStop")):
        program, command, *_ = line.split()
        assert program == PROGRAM
        assert command in known


def test_nobody_is_root_and_the_state_is_where_systemd_keeps_it() -> None:
    assert values("User") == ["kvferry"]
    (environment,) = values("Environment")
    told = dict(each.split("=", 1) for each in environment.split())
    assert told["KVFERRY_STATE_DIR"] == f"/var/lib/{values('StateDirectory')[0]}"
    assert told["KVFERRY_CACHE_DIR"] == f"/var/cache/{values('CacheDirectory')[0]}"


def complaints(folder: Path, text: str) -> list[str]:
    """What systemd-analyze says of a unit."""
    unit = folder / "kvferry@laptop.service"
    # Of a program that is not installed here it would complain, so one that is stands in its place.
    unit.write_text(text.replace(PROGRAM, sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return [line for line in done.stderr.splitlines() if unit.name in line]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_it_and_would_say_what_it_does_not_know(tmp_path: Path) -> None:
    assert complaints(tmp_path, UNIT.read_text()) == []
    assert complaints(tmp_path, UNIT.read_text().replace("KillMode=", "KillMood="))
