"""Ends of processes, in ways that only a second parent can make."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from pace import allowed

from cluster.processes import KILL_PATIENCE_SECONDS, NODE_VARIABLE, end_node_processes, node_processes

NEGLIGENT = """
import os, subprocess, sys
waiting = [sys.executable, "-c", "import signal; signal.pause()"]
child = subprocess.Popen(waiting, env={**os.environ, sys.argv[1]: sys.argv[2]})
print(child.pid, flush=True)
sys.stdin.read()
"""

WRITES = """
import ctypes, signal, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode())
log = open(sys.argv[2], sys.argv[3])
print(flush=True)
signal.pause()
"""
"""A process with a title of its own, and a file open."""


@pytest.mark.parametrize(
    ("title", "mode", "belongs"),
    [("ray::Agent", "a", True), ("ray::Agent", "r", False), ("python", "a", False)],
    ids=["an orphan", "of another node", "a driver"],
)
def test_an_orphan_is_known_by_what_it_writes_and_a_driver_is_nobodys(
    tmp_path: Path, title: str, mode: str, belongs: bool
) -> None:
    log = tmp_path / "some.log"
    log.touch()
    words = [sys.executable, "-c", WRITES, title, str(log), mode]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert [each.pid for each in node_processes(str(tmp_path))] == [process.pid] * belongs
            end_node_processes(str(tmp_path), None, grace=0.0)
            assert (process.poll() is not None) == belongs
        finally:
            process.kill()


def test_a_dead_process_whose_parent_has_not_asked_after_it_holds_nobody_up(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", NEGLIGENT, NODE_VARIABLE, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert [process.pid for process in node_processes(folder)] == [child]
        begun = time.monotonic()
        assert end_node_processes(folder, None, grace=0.0) == []
        assert time.monotonic() - begun < allowed(KILL_PATIENCE_SECONDS / 2)
        assert Path(f"/proc/{child}").exists(), "it is dead, and still its parent's"
        assert parent.stdin is not None
        parent.stdin.close()
