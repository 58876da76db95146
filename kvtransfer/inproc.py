"""Blocks between two transports of one process: for tests, and for both roles on one engine.

The same code as `tcp.py`, over socket pairs instead of ports: a hand-off here is a hand-off there.
Addresses are "inproc:NAME", and mean something only within one `InprocNetwork`.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
from collections.abc import Sequence

from kvtransfer.endpoint import Endpoint
from kvtransfer.errors import PeerLostError
from kvtransfer.messages import ConnectionLimits, OpenRequest, TransferDeadlines
from kvtransfer.pull import SocketPull
from kvtransfer.server import PullServer
from kvtransfer.taps import Taps
from kvtransfer.transport import KvSource


class InprocNetwork:
    """Who listens under which address. Shared by the transports that are to reach each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, PullServer] = {}
        self._ports = itertools.count(1)

    def bind(self, host: str, port: int, server: PullServer) -> str:
        """Raises OSError when the address is taken."""
        with self._lock:
            address = f"inproc:{host}:{port or next(self._ports)}"
            if address in self._servers:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), address)
            self._servers[address] = server
            return address

    def release(self, address: str) -> None:
        with self._lock:
            del self._servers[address]

    def dial(self, address: str) -> socket.socket:
        with self._lock:
            server = self._servers.get(address)
        if server is None:
            raise PeerLostError(f"nobody listens at {address}")
        try:
            near, far = socket.socketpair()
        except OSError as error:
            raise PeerLostError(f"no sockets for {address}: {error.strerror}") from error
        server.serve(far)
        return near


class InprocTransport:
    """A `Transport` whose peers are in the same process."""

    name = "inproc"

    def __init__(
        self,
        network: InprocNetwork,
        deadlines: TransferDeadlines | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._network = network
        self._endpoint = Endpoint(self.name, network, deadlines, limits)
        self._addresses: list[str] = []

    async def listen(self, host: str, port: int, source: KvSource) -> str:
        server = self._endpoint.make_server(source)
        address = self._network.bind(host, port, server)
        self._addresses.append(address)
        return address

    def pull(self, address: str, request: OpenRequest, blocks: Sequence[memoryview]) -> SocketPull:
        return self._endpoint.pull(address, request, blocks)

    def tap(self, taps: Taps) -> None:
        self._endpoint.tap(taps)

    async def close(self) -> None:
        while self._addresses:
            self._network.release(self._addresses.pop())
        await self._endpoint.close()
