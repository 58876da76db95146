"""The asking side's connections: new ones, and idle ones that wait for another pull from the same peer.

A peer is an address and an epoch: what was open to a process that has died is never used for its
successor on the same port.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.connection import Connection
from kvtransfer.errors import PeerLostError
from kvtransfer.messages import ConnectionLimits, TransferDeadlines
from kvtransfer.taps import NoTaps, Taps


class Dialer(Protocol):
    def dial(self, address: str) -> socket.socket:
        """A connected stream socket. Blocks for at most `connect_s`.

        Raises `PeerLostError`, or `PeerSilentError` when the time is over.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Idle:
    since: float
    address: str
    epoch: int
    connection: Connection


class ConnectionPool:
    """Bounded in number and age. For any thread."""

    def __init__(self, dialer: Dialer, deadlines: TransferDeadlines, limits: ConnectionLimits) -> None:
        self.taps: Taps = NoTaps()  # of connections that are made from now on
        self._dialer = dialer
        self._deadlines = deadlines
        self._limits = limits
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []  # oldest first
        self._is_closed = False

    def dial(self, address: str) -> Connection:
        """A new one. Raises as the dialer does."""
        sock = self._dialer.dial(address)
        try:
            return Connection(sock, self._deadlines, self.taps)
        except OSError as error:
            sock.close()
            raise PeerLostError(f"the connection broke at once: {error.strerror}") from error

    def take(self, address: str, epoch: int) -> Connection | None:
        """An idle one that looks alive, the latest used first."""
        while True:
            with self._lock:
                self._drop_old()
                of_peer = [idle for idle in self._idle if (idle.address, idle.epoch) == (address, epoch)]
                if not of_peer:
                    return None
                self._idle.remove(of_peer[-1])
            if of_peer[-1].connection.is_fresh():
                return of_peer[-1].connection
            of_peer[-1].connection.close()

    def give(self, address: str, epoch: int, connection: Connection) -> None:
        """After ACK only. Keeps it, or closes it when enough are kept."""
        with self._lock:
            self._drop_old()
            if not self._is_closed and len(self._idle) < self._limits.max_idle:
                self._idle.append(_Idle(time.monotonic(), address, epoch, connection))
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for entry in idle:
            entry.connection.close()

    def _drop_old(self) -> None:
        oldest = time.monotonic() - self._limits.idle_s / 2
        while self._idle and self._idle[0].since < oldest:
            self._idle.pop(0).connection.close()
