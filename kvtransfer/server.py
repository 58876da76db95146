"""Serves connections: one thread each, which waits for OPEN, serves the pull, and waits for the next.

What a stranger can do here: hold one of `max_connections` for `open_s`, and at most 1 MiB of memory.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time

from kvtransfer.connection import Connection
from kvtransfer.errors import ProtocolError, TransferError
from kvtransfer.frames import FrameType, OpenFrame
from kvtransfer.gate import SourceGate
from kvtransfer.messages import ConnectionLimits, TransferDeadlines
from kvtransfer.serving import ServedPull
from kvtransfer.taps import NoTaps, Taps
from kvtransfer.threads import ThreadGroup

logger = logging.getLogger(__name__)


class PullServer:
    """Owns every connection that came in, and answers for one source."""

    def __init__(
        self, name: str, gate: SourceGate, deadlines: TransferDeadlines, limits: ConnectionLimits, threads: ThreadGroup
    ) -> None:
        self.taps: Taps = NoTaps()  # of connections that come from now on
        self._name = name
        self._gate = gate
        self._deadlines = deadlines
        self._limits = limits
        self._threads = threads
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._num_idle = 0
        self._is_closed = False

    def serve(self, sock: socket.socket) -> None:
        """Take over a connected socket. One too many is closed at once. Never raises."""
        try:
            connection = Connection(sock, self._deadlines, self.taps)
        except OSError:  # it broke before it began
            sock.close()
            return
        with self._lock:
            has_room = not self._is_closed and len(self._connections) < self._limits.max_connections
            if has_room:
                self._connections.add(connection)
        try:
            if has_room:
                self._threads.start(f"{self._name}-serve", functools.partial(self._run, connection))
                return
        except RuntimeError as error:
            logger.warning("no thread for a new connection: %s", error)
        self._forget(connection)

    def shutdown(self) -> None:
        """Cut every connection and take no more; their threads end soon."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        for connection in connections:
            connection.shutdown()

    def _run(self, connection: Connection) -> None:
        try:
            self._serve_pull(connection)
            while self._wait_for_another(connection):
                self._serve_pull(connection)
        except TransferError as error:
            logger.info("a connection ended: %s: %s", error.label, error)
        except Exception:  # the connection closes and the peer knows; the process goes on
            logger.exception("a connection's thread failed")
        finally:
            self._forget(connection)

    def _serve_pull(self, connection: Connection) -> None:
        until = time.monotonic() + self._deadlines.open_s
        header = connection.receive_header(until=until)
        if header.type is not FrameType.OPEN:
            raise ProtocolError(f"{header.type.name} where OPEN is expected")
        frame = connection.receive_body(header, until)
        assert isinstance(frame, OpenFrame)
        ServedPull(connection, self._gate, self._deadlines).serve(frame)

    def _wait_for_another(self, connection: Connection) -> bool:
        with self._lock:
            if self._is_closed or self._num_idle >= self._limits.max_idle:
                return False
            self._num_idle += 1
        try:
            return connection.wait_readable(self._limits.idle_s)
        finally:
            with self._lock:
                self._num_idle -= 1

    def _forget(self, connection: Connection) -> None:
        connection.close()
        with self._lock:
            self._connections.discard(connection)
