"""The phases of a start, and what is shown of them."""

from __future__ import annotations

import io
import subprocess
import sys
import time

from rich.console import Console

from cluster.actors import ActorStatus
from cluster.display import StepPrinter, start_lines
from cluster.phases import Phase, PhaseClock, since_process_start, spelled
from cluster.progress import Step
from cluster.status import ActorReport, ClusterReport


def test_a_phase_lasts_until_the_next_and_one_that_comes_again_is_added_to() -> None:
    clock = PhaseClock("imports", 10.0)
    clock.enter("weights", 11.5)
    clock.enter("weights", 11.75)
    assert clock.phases == (Phase(name="imports", seconds=1.5),)
    clock.enter("imports", 12.0)
    clock.end(12.25)
    clock.end(99.0)
    assert clock.phases == (Phase(name="imports", seconds=1.75), Phase(name="weights", seconds=0.5))


def test_the_first_phase_of_a_command_began_with_its_process() -> None:
    clock = since_process_start("command")
    clock.end(time.monotonic())
    (phase,) = clock.phases
    assert phase.seconds > 0.02


def test_a_start_is_told_with_its_total() -> None:
    assert spelled((Phase(name="command", seconds=0.5), Phase(name="Ray's node", seconds=3.25))) == (
        "3.8 s (command 0.50, Ray's node 3.25)"
    )


def test_the_status_has_a_line_for_the_cluster_and_one_for_each_process_that_is_ready() -> None:
    phases = (Phase(name="process", seconds=1.0), Phase(name="weights", seconds=0.25))
    up = ActorStatus(name="decode-0", role="decode", pid=1, host="h", state="ready", phases=phases)
    coming = ActorStatus(name="prefill-0", role="prefill", pid=2, host="h", state="starting", phases=phases[:1])
    report = ClusterReport(
        name="c",
        url="",
        model="",
        transport="",
        state="starting",
        actors=(ActorReport(status=up), ActorReport(status=coming)),
        phases=phases[:1],
    )
    assert start_lines(report) == [
        "start of the cluster: 1.0 s (process 1.00)",
        "start of decode-0: 1.2 s (process 1.00, weights 0.25)",
    ]


def test_what_is_to_be_said_of_a_step_is_printed_on_its_line() -> None:
    out = io.StringIO()
    printer = StepPrinter(Console(file=out, width=40))
    printer(
        Step(actor="decode-0", stage="ready", fraction=1.0, detail="1.2 s (process 1.00, weights 0.25, warm-up 0.5)")
    )
    assert out.getvalue().endswith("s] decode-0     ready: 1.2 s (process 1.00, weights 0.25, warm-up 0.5)\n")


def test_an_actor_sets_its_variables_before_any_numeric_library_is_there() -> None:
    loaded = "import ray, cluster.actors, sys; print([name for name in ('numpy', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=120.0, check=True)
    assert done.stdout.strip() == "[]"
