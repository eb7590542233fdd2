"""Who waits for whom among the sessions of a parallel run."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

from turns import turn


def gate_is_held(folder: Path) -> bool:
    with (folder / "gate").open() as gate:
        try:
            fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_heavy_tests_run_side_by_side(tmp_path: Path) -> None:
    with turn(tmp_path, alone=False), turn(tmp_path, alone=False):
        assert not gate_is_held(tmp_path)


def test_a_serial_one_waits_for_who_is_there_and_is_passed_by_nobody(tmp_path: Path) -> None:
    order: list[str] = []

    def take(name: str, alone: bool) -> None:
        with turn(tmp_path, alone=alone):
            order.append(name)

    with turn(tmp_path, alone=False):
        serial = threading.Thread(target=take, args=("serial", True))
        serial.start()
        limit = time.monotonic() + 20.0
        while not gate_is_held(tmp_path):
            assert time.monotonic() < limit, "it does not wait"
        # It stands at the gate behind the serial one, or has not come yet; either way it is behind.
        late = threading.Thread(target=take, args=("late", False))
        late.start()
        order.append("first")
    serial.join()
    late.join()
    assert order == ["first", "serial", "late"]
