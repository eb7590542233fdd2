"""``kvferry doctor`` on this machine, with libraries that are missing, broken, crash and hang."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cluster.demo import laptop_config
from cluster.doctor.examination import INLINE, ISOLATED, ORDER, guarded, isolated
from cluster.doctor.finding import Finding
from cluster.doctor.transports import SCHEMES, examine_transport
from cluster.doctor.wish import Wish
from kv_transfer.transport import describe
from protocol.errors import UnknownTransport

WISH = Wish(config=laptop_config())
LIBRARIES = {
    "torch": "raise ImportError('libcudart.so.12: cannot open\\nshared object file')",
    "ray": "import os; print('by the way', flush=True); os.abort()",
    "triton": "raise RuntimeError('no driver')",
}
"""What stands in for each of them: one that lacks a file, one that takes its process with it, one that throws."""


@pytest.fixture
def broken_libraries(tmp_path: Path) -> Path:
    folder = tmp_path / "broken"
    for name, program in LIBRARIES.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(program)
    return folder


def doctor(*arguments: str, home: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    cache = {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "cluster", "doctor", *arguments],
        capture_output=True,
        text=True,
        cwd=home,
        timeout=240,
        env={
            **cache,
            "PATH": os.environ["PATH"],
            "KVFERRY_STATE_DIR": str(home / "state"),
            "KVFERRY_CACHE_DIR": str(home / "cache"),
            "PYTHONPATH": os.pathsep.join([*([str(path)] if path else []), root]),
        },
        check=False,
    )


def by_check(findings: list[Finding] | list[dict[str, str]]) -> dict[str, Finding]:
    made = [each if isinstance(each, Finding) else Finding(**each) for each in findings]  # type: ignore[arg-type]
    return {each.check: each for each in made}


def test_broken_libraries_are_lines_and_the_rest_is_examined(broken_libraries: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: m\nengine: {block_sise: 8}\n")
    done = doctor("--json", "c.yaml", home=tmp_path, path=broken_libraries)
    assert done.returncode == 1
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["healthy"] is False
    found = by_check(report["findings"])
    assert found["file"].verdict == "broken", "and the default cluster is looked at in its place"
    assert found["file"].said == "c.yaml: engine.block_sise is not a known key; did you mean 'block_size'?"
    assert found["torch"].verdict == "broken"
    assert found["torch"].said == "does not import: libcudart.so.12: cannot open shared object file"
    assert found["ray"].verdict == "broken"
    assert "ended by SIGABRT" in found["ray"].said
    assert (found["triton"].verdict, found["triton"].fix) == ("note", ""), "nothing on this machine asks for it"
    assert "no driver" in found["triton"].said
    for check in ("python", "packages", "dependencies", "shm", "tcp"):
        assert found[check].verdict == "ok", found[check]
    assert "crossed in" in found["tcp"].said
    assert found["model"].verdict == "note"
    assert found["model"].fix == "kvferry model get smollm2-135m"
    assert {"nofile", "memlock", "shared memory", "clock", "rdma", "ucx", "router.port"} <= found.keys()


def test_a_file_is_held_against_the_machine(broken_libraries: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = tmp_path / "c.yaml"
        file.write_text(
            f"model: ./nowhere\nrouter: {{port: {port}}}\nprefill: {{replicas: 2, gpus: 1}}\n"
            "engine: {device: cuda}\ntransfer: {transport: tcp}\n"
        )
        done = doctor("c.yaml", home=tmp_path, path=broken_libraries)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    verdicts = {each[8:].partition(": ")[0]: each[:8].strip() for each in lines[:-1]}
    assert verdicts["file"] == "ok"
    assert verdicts["router.port"] == verdicts["model"] == verdicts["triton"] == "broken"
    assert verdicts["tcp"] == "ok"
    (taken_line,) = [each for each in lines if "router.port" in each]
    assert f"cannot listen on 127.0.0.1:{port}" in taken_line
    assert taken_line.endswith("-- fix: another router.port; 0 takes a free one")
    assert lines[-1].split(" broken, ")[0].isdigit()


@pytest.fixture
def hanging_libraries(tmp_path: Path) -> Path:
    """Libraries that leave their process's id in a file and then stand still."""
    for name in LIBRARIES:
        (tmp_path / name).mkdir()
        mark = str(tmp_path / f"{name}.pid")
        (tmp_path / name / "__init__.py").write_text(
            f"import os, pathlib, threading\npathlib.Path({mark!r}).write_text(str(os.getpid()))\n"
            "threading.Event().wait()"
        )
    return tmp_path


def pids(folder: Path) -> list[int]:
    return [int(text) for mark in folder.glob("*.pid") if (text := mark.read_text())]


def test_a_check_that_hangs_is_ended(hanging_libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(hanging_libraries), prepend=os.pathsep)
    (found,) = isolated("ray", WISH, patience=2.0)
    assert (found.check, found.verdict) == ("ray", "broken")
    assert "no answer within 2 s" in found.said
    assert not any(map(psutil.pid_exists, pids(hanging_libraries)))


def test_an_interrupt_ends_it_and_its_processes(hanging_libraries: Path) -> None:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(hanging_libraries), root])}
    command = [sys.executable, "-m", "cluster", "doctor"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, start_new_session=True, stdout=quiet, stderr=quiet) as process:
        try:
            limit = time.monotonic() + 120.0
            while len(pids(hanging_libraries)) < len(LIBRARIES):
                assert time.monotonic() < limit, "as many checks as run at once hang"
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(60.0) != 0
            assert not any(map(psutil.pid_exists, pids(hanging_libraries)))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_transport_whose_library_cannot_be_built_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (found,) = isolated("ucx", WISH)
    assert found.verdict == "note"
    assert found.said.startswith("does not work here: ")
    assert "UCX" in found.said or "compiler" in found.said


def test_a_transport_that_is_not_there_is_a_line() -> None:
    (found,) = examine_transport("pigeon", WISH)
    assert found.verdict == "note"
    assert "no transport 'pigeon'" in found.said


def test_transports_say_what_they_have_to_say() -> None:
    assert describe("tcp") == ""
    assert describe("ucx").startswith("ucx: ")
    with pytest.raises(UnknownTransport):
        describe("pigeon")


def test_what_a_check_throws_is_a_line() -> None:
    def throws(_: Wish) -> list[Finding]:
        raise ZeroDivisionError("by zero")

    (found,) = guarded("limits", throws, WISH)
    assert (found.check, found.verdict) == ("limits", "broken")
    assert "ZeroDivisionError: by zero" in found.said


def test_each_check_has_its_place_and_none_runs_twice() -> None:
    assert sorted(ORDER) == sorted([*INLINE, *ISOLATED])
    assert {*SCHEMES} <= {*ISOLATED}, "a transport's library may end its process"


def test_the_command_itself_loads_no_heavy_library() -> None:
    program = (
        "import sys, cluster.doctor.command; "
        "print([m for m in ('torch', 'ray', 'triton', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
