"""``kvferry bench transfer`` as a user runs it: two real processes, their errors, and their ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from refusals import Refused

from cluster.bench import message
from cluster.bench.report import Report

COMMAND = (sys.executable, "-m", "cluster", "bench", "transfer")
QUICK = ("--transports", "tcp", "--seconds", "0.02")
ENDLESS = ("--transports", "tcp", "--tokens", "16,4k", "--seconds", "600", "--time-limit", "3000")
PATIENCE = 240.0
PROMPT = 120.0
INTERRUPTED = 130
TERMINATED = 128 + signal.SIGTERM


def bench(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


def load(file: Path) -> Report:
    return msgspec.json.decode(file.read_bytes(), type=Report)


@contextmanager
def started(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in the background; it and what it started are ended in any case."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*COMMAND, *arguments], cwd=folder, stdout=pipe, stderr=pipe, text=True) as process:
        children: list[psutil.Process] = []
        try:
            yield process
        finally:
            if process.poll() is None:
                children = psutil.Process(process.pid).children(recursive=True)
            for one in (process, *children):
                one.kill()


@contextmanager
def running(*arguments: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A run whose second process is there and connected, and that process."""
    with started(*arguments, folder=folder) as process:
        parent = psutil.Process(process.pid)

        def connected() -> bool:
            # Its two listeners and its connections for orders, for the transport, and for the plain socket.
            return any(len(one.net_connections("tcp")) > 4 for one in parent.children())

        wait_for(connected)
        (child,) = parent.children()
        yield process, child


@contextmanager
def listening(*arguments: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with started("--listen", "127.0.0.1:0", *arguments, folder=folder) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening at 127.0.0.1:"), line
        yield process, line.split()[-1]


def wait_for(holds: Callable[[], bool]) -> None:
    ended = threading.Event()
    for _ in range(int(PATIENCE / 0.02)):
        if holds():
            return
        ended.wait(0.02)
    pytest.fail("it did not come true in time")


def test_a_short_run_gives_a_table_and_json(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = bench(*QUICK, "--tokens", "16,1k", "--concurrency", "1,3", "--json", str(file), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = load(file)
    assert report.complete
    assert report.layout.bytes_per_token == 23_040
    assert len(report.outcomes) == 2 * 2 * (1 + 2)
    for outcome in report.outcomes:
        found = outcome.measured
        assert found is not None, outcome.reason
        assert found.nbytes == found.blocks * report.block_bytes
        assert found.blocks == -(-outcome.case.tokens // 16)
        assert found.rounds >= 5
        assert found.latency.samples == found.rounds * outcome.case.concurrency
        assert 0 < found.latency.p50 <= found.latency.p99
        assert found.gb_per_s > 0
        assert found.ratio > 0
        assert found.limit == "socket"
    assert "plain blocking TCP connection" in done.stdout
    for heading in ("p50 ms", "p90 ms", "p99 ms", "GB/s", "ratio"):
        assert heading in done.stdout
    assert done.stdout.count("\ntcp ") == len(report.outcomes)
    assert done.stderr.count(" GB/s\n") == len(report.outcomes)


def test_every_registered_transport_is_measured_or_says_why_not(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = bench("--tokens", "16", "--tables", "scattered", "--seconds", "0.02", "--json", str(file), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    outcomes = {outcome.case.transport: outcome for outcome in load(file).outcomes}
    assert outcomes["tcp"].state == "measured"
    assert outcomes["inproc"].state == "skipped"
    assert "skipped inproc: inproc works within one process only" in done.stdout
    assert all(outcome.measured or outcome.reason for outcome in outcomes.values())


def test_two_commands_meet_by_listen_and_connect(tmp_path: Path) -> None:
    with listening(folder=tmp_path) as (listener, place):
        for _ in range(2):
            done = bench(*QUICK, "--tokens", "16", "--connect", place, folder=tmp_path)
            assert done.returncode == 0, done.stderr
            assert "\ntcp " in done.stdout
        listener.send_signal(signal.SIGINT)
        listener.communicate(timeout=PROMPT)


def test_the_listening_side_bounds_its_pool_and_says_so(tmp_path: Path) -> None:
    with listening("--max-pool", "1m", folder=tmp_path) as (_, place):
        done = bench(*QUICK, "--tokens", "512", "--connect", place, folder=tmp_path)
    assert done.returncode == 1
    assert "skipped tcp: a pool of 22 MiB is more than --max-pool of the listening side" in done.stdout


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\3abc", b"\xff" * 64, b"\0\0"])
def test_the_listening_side_survives_strangers(junk: bytes, tmp_path: Path) -> None:
    with listening(folder=tmp_path) as (listener, place):
        host, _, port = place.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as stranger:
            stranger.sendall(junk)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
        assert bench(*QUICK, "--tokens", "16", "--connect", place, folder=tmp_path).returncode == 0
        listener.terminate()
        _, errors = listener.communicate(timeout=PROMPT)
        assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "gpt-9"), "smollm2-135m, llama-3-8b, llama-3-70b-tp8, deepseek-v2-lite"),
        (("--transports", "pigeon"), "no transport 'pigeon'; known: cuda_ipc, "),
        (("--tokens", "many"), "tokens must be a number"),
        (("--tokens", "128k", "--model", "llama-3-8b"), "more than --max-pool allows (2048 MiB)"),
        (("--tokens", "128k", "--model", "llama-3-8b", "--max-pool", "900g", "--concurrency", "20"), "available"),
        (("--connect", "nowhere"), "connect must be HOST:PORT, got 'nowhere'"),
        (("--connect", "127.0.0.1:9"), "nobody answers at 127.0.0.1:9"),
        (("--listen", "127.0.0.1:1", "--connect", "127.0.0.1:2"), "give one of them"),
        (("--json", "missing/found.json"), "there is no folder"),
        (("--plot", "found.gif"), "plot must end in .html, .png, .svg"),
    ],
)
def test_an_error_is_one_line_and_a_status(
    arguments: tuple[str, ...], said: str, refused: Refused, tmp_path: Path
) -> None:
    done = refused("bench", "transfer", *arguments)
    assert done.status == 1
    assert done.out == ""
    assert said in done.err
    assert done.err.startswith("kvferry: ")
    assert done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
def test_an_interrupted_run_ends_both_processes_and_tells_what_it_has(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    arguments = ("--transports", "tcp", "--tokens", "16,4k", "--seconds", "0.05", "--json", "found.json")
    with started(*arguments, folder=tmp_path) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("[1/")
        children = psutil.Process(process.pid).children()
        process.send_signal(number)
        out, errors = process.communicate(timeout=PROMPT)
        assert process.returncode == status
        assert "Traceback" not in errors
        assert not any(child.is_running() for child in children)
    assert "cut short" in out
    report = load(tmp_path / "found.json")
    assert not report.complete
    assert report.outcomes[0].measured is not None


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
def test_an_interrupt_in_mid_transfer_ends_both_processes(number: signal.Signals, status: int, tmp_path: Path) -> None:
    with running(*ENDLESS, folder=tmp_path) as (process, child):
        process.send_signal(number)
        _, errors = process.communicate(timeout=PROMPT)
        assert process.returncode == status
        assert "Traceback" not in errors
        assert not child.is_running()


def test_the_second_process_ends_when_the_first_is_killed(tmp_path: Path) -> None:
    with running(*ENDLESS, folder=tmp_path) as (process, child):
        process.kill()
        child.wait(PROMPT)


def test_a_killed_second_process_ends_the_run_with_an_error(tmp_path: Path) -> None:
    with running(*ENDLESS, folder=tmp_path) as (process, child):
        child.kill()
        out, errors = process.communicate(timeout=PROMPT)
        assert process.returncode == 1
        assert "failed tcp, 16 tokens" in out
        assert errors.splitlines()[-1].startswith(("kvferry: nobody answers", "kvferry: the other end is gone"))
        assert "Traceback" not in errors


def test_a_stopped_second_process_costs_one_case_its_time_limit(tmp_path: Path) -> None:
    limits = ("--transports", "tcp", "--tokens", "16", "--seconds", "600", "--time-limit", "2")
    with running(*limits, folder=tmp_path) as (process, child):
        child.suspend()
        assert process.stderr is not None
        assert process.stderr.readline() == "[1/2] tcp, 16 tokens, contiguous, whole, 1 at once: failed\n"
        child.resume()
        out, _ = process.communicate(timeout=PROMPT)
        assert process.returncode == 1
        assert "not done within 2 seconds" in out
        assert "\ntcp " in out, "the next case was measured"


def test_messages_are_bounded() -> None:
    ticket = b"t" * 16
    for wrong in (
        {"type": "Open", "tickets": [ticket[:-1]], "blocks": [[1]]},
        {"type": "Open", "tickets": [ticket], "blocks": [[-1]]},
        {"type": "Checksum", "blocks": [0] * (message.MAX_ITEMS + 1)},
        {"type": "Plain", "offsets": [0], "sizes": [1], "more": 1},
        {"type": "Prepared", "address": "a", "host": "b"},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=message.Request)
