"""What runs in a carrier's process: takes orders from its worker until that hangs up.

Life cycle: started -> introduced -> [connect | move | free]* -> the worker has hung up, or a move has failed -> ended.
It sleeps while nothing is to be moved.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

from kv_transfer.carried.movers import MOVERS, Mover
from kv_transfer.carried.orders import MAX_INTRODUCTION, MAX_REASON, ORDER, Order, Report
from kv_transfer.carried.staging import Staging

LAST_SECONDS = 5
SPINS = 50
"""Turns without a move before it stops holding on to its core."""
PAUSE = 50e-6


class Carrier:
    """See the module.

    Args:
        worker: the socket pair's end.
        mover: what moves.
    """

    def __init__(self, worker: socket.socket, mover: Mover) -> None:
        self._worker = worker
        self._mover = mover

    def run(self) -> None:
        """Take orders to the end."""
        told = self._mover.release.encode()
        self._tell(Report.INTRODUCED, text=bytes([len(told)]) + told + self._mover.introduction())
        still = 0
        while True:
            wait = None if not self._mover.busy else 0.0 if still < SPINS else PAUSE
            if select.select([self._worker], [], [], wait)[0] and not self._obey():
                return
            still += 1
            if self._mover.busy:
                for slot in self._mover.turn():
                    self._tell(Report.MOVED, slot)
                    still = 0

    def _obey(self) -> bool:
        head = self._read(ORDER.size)
        if head is None:
            return False
        order, slot, length = ORDER.unpack(head)
        match Order(order):
            case Order.CONNECT:
                peer = self._read(length)
                if peer is None:
                    return False
                self._mover.connect(peer[slot:], peer[:slot])
                self._tell(Report.CONNECTED)
            case Order.MOVE:
                self._mover.move(slot, length)
            case Order.FREE:
                self._mover.free(slot)
        return True

    def _read(self, nbytes: int) -> bytes | None:
        data = b""
        while len(data) < nbytes:
            piece = self._worker.recv(nbytes - len(data))
            if not piece:
                return None
            data += piece
        return data

    def _tell(self, report: Report, slot: int = 0, text: bytes = b"") -> None:
        assert len(text) <= MAX_INTRODUCTION, "an introduction is short"
        self._worker.sendall(ORDER.pack(report, slot, len(text)) + text)


def main() -> None:
    """``child.py scheme module send|receive socket staging``."""
    scheme, module, role, worker, staging = sys.argv[1:]
    connection = socket.socket(fileno=int(worker))
    mover: Mover | None = None
    try:
        mover = MOVERS[scheme](module, Staging(int(staging)), receives=role == "receive")
        Carrier(connection, mover).run()
    except BrokenPipeError:
        pass
    except Exception as error:
        # Whatever the library says, the worker shall hear it.
        reason = f"{type(error).__name__}: {error}".encode()[:MAX_REASON]
        connection.sendall(ORDER.pack(Report.FAILED, 0, len(reason)) + reason)
    finally:
        # A library that hangs in its end must not outlive its worker.
        signal.alarm(LAST_SECONDS)
        if mover is not None:
            mover.close()
        sys.stderr.flush()
        # The libraries' own ends, at the interpreter's, have crashed and hung.
        os._exit(0)


if __name__ == "__main__":
    main()
