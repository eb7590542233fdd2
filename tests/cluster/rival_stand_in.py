"""A stand-in for a rival's package: the part of ``mooncake.engine`` that the benchmark calls, over a plain socket."""

from __future__ import annotations

from pathlib import Path

ENGINE = """
import ctypes, os, socket, struct, threading, time

HEAD = struct.Struct("=?QQ")


def exactly(connection, count):
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


class TransferEngine:
    def initialize(self, host, handshake, protocol, device):
        self.listener = socket.create_server((host, 0))
        threading.Thread(target=self.accept, daemon=True).start()
        return 0

    def get_rpc_port(self):
        return self.listener.getsockname()[1]

    def register_memory(self, address, size):
        return 0

    def accept(self):
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with connection:
            while head := exactly(connection, HEAD.size):
                reads, address, size = HEAD.unpack(head)
                if reads:
                    connection.sendall(ctypes.string_at(address, size))
                else:
                    ctypes.memmove(address, exactly(connection, size), size)
                    connection.sendall(b"1")

    def batch_transfer_sync_read(self, peer, here, there, sizes):
        {fault}
        return self.move(True, peer, here, there, sizes)

    def batch_transfer_sync_write(self, peer, here, there, sizes):
        return self.move(False, peer, here, there, sizes)

    def move(self, reads, peer, here, there, sizes):
        host, _, port = peer.rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            for mine, other, size in zip(here, there, sizes, strict=True):
                connection.sendall(HEAD.pack(reads, other, size))
                if reads:
                    ctypes.memmove(mine, exactly(connection, size), size)
                else:
                    connection.sendall(ctypes.string_at(mine, size))
                    assert exactly(connection, 1)
        return 0
"""


def install(folder: Path, *, fault: str = "pass") -> None:
    """Put the package into ``folder``; ``fault`` is a statement that a read begins with."""
    package = folder / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(ENGINE.replace("{fault}", fault))
