"""What lets a sender take its memory back from a receiver that copies from it: one entry per ship, in shared memory.

Life cycle of an entry, on the sender's side: written with the ship's number -> struck (0) when the ship is answered,
aborted, or lost -> quiet -> free for another ship. The receiver copies batch by batch; around each it holds a shared
lock on the entry, and looks at the number *after* it has the lock and once more before it gives the lock back. The
sender strikes the number and then tests for the exclusive lock: when that is to be had, the receiver is between two
batches, or dead, and its next look finds the number gone. The kernel orders the two, gives back the locks of the dead,
and keeps those of the stopped; so quiet is proved, and never assumed because time has passed.

Locks belong to an open file description: sender and receiver must have one each.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct

from kv_transfer.shm import sealed

SLOTS = 4096
"""Ships of one sender that may be under way at the same time."""
WORDS = 2
"""Of each entry: the ship's number, and the bytes copied so far."""
LEDGER_BYTES = SLOTS * WORDS * 8
FLOCK = struct.Struct("hhqqi0q")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""


def _lock(descriptor: int, kind: int, slot: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, FLOCK.pack(kind, os.SEEK_SET, slot, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


class SenderLedger:
    """The sender's end. Lives on the event loop."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("kvferry-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, LEDGER_BYTES)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.descriptor, LEDGER_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._free = list(range(SLOTS))

    def take(self, number: int) -> int:
        """An entry for a ship; the caller sees to it that there is a free one."""
        slot = self._free.pop()
        self._words[slot * WORDS + 1] = 0
        self._words[slot * WORDS] = number
        return slot

    def strike(self, slot: int) -> None:
        """No batch begins any more; one may be under way."""
        self._words[slot * WORDS] = 0

    def is_quiet(self, slot: int) -> bool:
        """Whether no byte is read for this struck entry, now or ever."""
        assert not self._words[slot * WORDS], "struck first"
        if not _lock(self.descriptor, fcntl.F_WRLCK, slot):
            return False
        _lock(self.descriptor, fcntl.F_UNLCK, slot)
        return True

    def copied(self, slot: int) -> int:
        """Bytes that the receiver says it has copied."""
        return self._words[slot * WORDS + 1]

    def give_back(self, slot: int) -> None:
        """The struck, quiet entry may serve another ship."""
        self._words[slot * WORDS] = 0
        self._free.append(slot)

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._map.close()
        os.close(self.descriptor)


class ReceiverLedger:
    """The receiver's end; one thread.

    Args:
        descriptor: taken over.

    Raises:
        IntegrityMismatch: it is not the memory of a ledger.
    """

    def __init__(self, descriptor: int) -> None:
        self._map = sealed.attach(descriptor, LEDGER_BYTES, writable=True)
        self._words = memoryview(self._map).cast("Q")
        self._descriptor = descriptor

    def valid(self, slot: int, number: int) -> bool:
        """Whether the ship is still wanted."""
        return self._words[slot * WORDS] == number

    def enter(self, slot: int, number: int) -> bool:
        """Begin to read for the ship; False when it was withdrawn. Each True is paid back with one :meth:`leave`."""
        # Only the sender that has struck the entry asks for the other lock.
        if not _lock(self._descriptor, fcntl.F_RDLCK, slot):
            return False
        if self.valid(slot, number):
            return True
        _lock(self._descriptor, fcntl.F_UNLCK, slot)
        return False

    def leave(self, slot: int, number: int, copied: int) -> bool:
        """Done reading; False when the ship was withdrawn meanwhile, and what was read may be anything."""
        valid = self.valid(slot, number)
        if valid:
            self._words[slot * WORDS + 1] = copied
        _lock(self._descriptor, fcntl.F_UNLCK, slot)
        return valid

    def close(self) -> None:
        """Let go of the memory, and of every lock."""
        self._words.release()
        self._map.close()
        os.close(self._descriptor)
