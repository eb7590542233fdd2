"""A port that is free, and stays so until somebody listens there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cluster import port as port_module
from cluster.port import FIRST, OUTGOING, bound_port
from protocol.errors import StartFailed


def test_a_free_one_is_none_that_a_connection_may_get() -> None:
    lowest, highest = map(int, OUTGOING.read_text().split())
    found = {bound_port("127.0.0.1", 0, "f") for _ in range(20)}
    assert len(found) > 1
    assert all(port >= FIRST and not lowest <= port <= highest for port in found)


def test_taken_ones_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = tmp_path / "range"
    everything.write_text("65535 65535")
    monkeypatch.setattr(port_module, "OUTGOING", everything)
    with socket.create_server(("127.0.0.1", bound_port("127.0.0.1", 0, "f"))) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(port_module, "FIRST", port)
        monkeypatch.setattr(port_module, "LAST", port + 1)
        assert {bound_port("127.0.0.1", 0, "f") for _ in range(8)} == {port + 1}
        with pytest.raises(StartFailed, match=f"f: cannot listen on 127.0.0.1:{port}: "):
            bound_port("127.0.0.1", port, "f")


@pytest.mark.parametrize("told", ["1024 65535", "nonsense", ""])
def test_where_no_port_is_quiet_the_kernel_has_one(told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "range"
    file.write_text(told)
    monkeypatch.setattr(port_module, "OUTGOING", file)
    assert bound_port("127.0.0.1", 0, "f") > 0
