"""A listening socket goes to another process with its queue."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from cluster.listener import offer, take

PROGRAM = """
import sys
from cluster.listener import take
with take(sys.argv[1]) as listener:
    print(listener.getsockname()[1], flush=True)
    for word in (b"queued", b"later"):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(word)
"""


def test_another_process_serves_whoever_waited_before_it_had_the_socket() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        there = listener.getsockname()
        waiting = socket.create_connection(there)
        other = subprocess.Popen([sys.executable, "-c", PROGRAM, offer(listener)], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == f"{there[1]}\n"
    with other, waiting, socket.create_connection(there) as later:
        assert (waiting.recv(16), later.recv(16)) == (b"queued", b"later")
    assert other.returncode == 0


def test_a_socket_is_given_once_and_is_as_it_was() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        name = offer(listener)
        with take(name) as taken:
            assert taken.getsockname() == listener.getsockname()
            # asyncio sends at once only at a socket of which it reads this.
            assert taken.proto == socket.IPPROTO_TCP
        with pytest.raises(ConnectionError):
            take(name)
