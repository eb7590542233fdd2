from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.state import StateStore

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """
import sys
from rich.console import Console
from cluster.config import ClusterConfig, EngineSection, RouterSection
from cluster.demo import run_demo

engine, router = EngineSection(num_blocks=64), RouterSection(port=0)
config = ClusterConfig(name="demo", model=sys.argv[1], served_name="tiny", engine=engine, router=router)
run_demo(Console(width=200), oneshot=False, config=config)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 0)])
def test_the_demo_answers_stays_and_leaves_nothing(
    number: signal.Signals, status: int, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    folders = {*Path("/tmp").glob("kvf-*")}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny_llama_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"KVFERRY_STATE_DIR": str(tmp_path)},
        encoding="utf-8",
        errors="replace",
    ) as demo:
        assert demo.stdout is not None
        shown, state = "", None
        for line in demo.stdout:
            shown += line
            if line.startswith("curl ") and state is None:
                state = StateStore(tmp_path).load("demo")
                demo.send_signal(number)
            elif "stopping" in line:
                demo.send_signal(signal.SIGTERM)  # the clean-up is not to be stopped half-way
        demo.wait()
    assert demo.returncode == status, shown
    assert state is not None
    for expected in ("prefill-0    ready", "first token (TTFT)", "KV moved: ", "GB/s", "the shm transport", state.url):
        assert expected in shown
    assert "Traceback" not in shown
    assert StateStore(tmp_path).names() == []
    assert state.node is not None
    assert not Path(state.node.temp_dir).exists()
    assert Path(state.node.temp_dir) not in folders
