"""The decode side of the shared-memory transports.

Life cycle: made (bound, accepting) -> windows open and close -> closed (threads joined, name free). One thread accepts,
and one serves each peer.
"""

from __future__ import annotations

import logging
import socket
import time
from threading import Lock, Thread, current_thread

from kv_transfer.shm.endpoint import check_user, listen, name_of
from kv_transfer.shm.serving import Service
from kv_transfer.shm.target import Target
from kv_transfer.transport import OnBroken, OnLanded, Receiver, TransportConfig, Window
from kv_transfer.windows import WindowBook
from protocol.errors import ChannelLost, KVFerryError

BACKLOG = 512
PAUSE = 0.1
"""Seconds without accepting after the process ran out of descriptors."""

log = logging.getLogger(__name__)


class ShmReceiver(Receiver):
    """See :class:`~kv_transfer.transport.Receiver`.

    Args:
        bind: ``shm://name``, or ``shm://*`` for a fresh name.
        target: what is written; taken over.
        config: timeout is what a new connection has for its hello, secret what it must know.

    Raises:
        ConfigError: the name cannot be taken.
    """

    def __init__(self, bind: str, target: Target, config: TransportConfig) -> None:
        self._target = target
        self._config = config
        self._book = WindowBook(target.nbytes, target.scheme)
        self._closed = False
        self._lock = Lock()
        self._services: dict[Thread, Service] = {}
        name = name_of(bind, target.scheme)
        self._address = f"{target.scheme}://{name}"
        self._name = name
        self._listener = listen(name, BACKLOG)
        self._thread = Thread(target=self._accept, name=f"kv-shm-accept-{name[:8]}")
        self._thread.start()

    @property
    def address(self) -> str:
        """``shm://name``, or of the scheme of the target."""
        return self._address

    def open(self, window: Window, on_landed: OnLanded, on_broken: OnBroken) -> None:
        """See :meth:`Receiver.open`."""
        if self._closed:
            raise ChannelLost("the receiver is closed")
        self._book.open(window, on_landed, on_broken)

    async def close_window(self, ticket: bytes) -> None:
        """See :meth:`Receiver.close_window`."""
        await self._book.close(ticket)

    async def close(self) -> None:
        """See :meth:`Receiver.close`."""
        if self._closed:
            return
        self._closed = True
        for ticket in self._book.tickets():
            await self._book.close(ticket)
        # No gate is open any more, so none of these threads has anything long to finish.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        with self._lock:
            left = dict(self._services)
        for thread, service in left.items():
            service.end()
            thread.join()
        self._target.close()

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if not self._closed:
                        log.warning("accept failed, trying again shortly: %s", error)
                        time.sleep(PAUSE)
                    continue
                self._take_in(connection)

    def _take_in(self, connection: socket.socket) -> None:
        with self._lock:
            full = len(self._services) >= self._config.max_connections
        try:
            check_user(connection)
        except (ChannelLost, OSError) as error:
            log.warning("turned a peer away: %s", error)
            full = True
        if full or self._closed:
            connection.close()
            return
        service = Service(connection, self._book, self._target, self._config)
        thread = Thread(target=self._serve, args=(service,), name=f"kv-shm-serve-{self._name[:8]}")
        with self._lock:
            self._services[thread] = service
        thread.start()

    def _serve(self, service: Service) -> None:
        try:
            service.run()
        except ChannelLost as error:
            log.debug("a peer is gone: %s", error)
        except KVFerryError as error:
            log.warning("turned a peer away: %s", error)
        except Exception:
            # A fault of ours must cost this connection alone.
            log.exception("serving failed")
        finally:
            with self._lock:
                del self._services[current_thread()]
