"""All that a transport over stream sockets is, apart from where the sockets come from."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Sequence

from kvtransfer.errors import AbortedError, TransferError
from kvtransfer.gate import SourceGate
from kvtransfer.messages import ConnectionLimits, OpenRequest, TransferDeadlines
from kvtransfer.outgoing import as_blocks
from kvtransfer.pool import ConnectionPool, Dialer
from kvtransfer.pull import SocketPull
from kvtransfer.server import PullServer
from kvtransfer.taps import NoTaps, Taps
from kvtransfer.threads import ThreadGroup
from kvtransfer.transport import KvSource

logger = logging.getLogger(__name__)


class Endpoint:
    """Serves any number of sources and pulls from any number of peers. Owns what runs, to end it."""

    def __init__(
        self, name: str, dialer: Dialer, deadlines: TransferDeadlines | None, limits: ConnectionLimits | None
    ) -> None:
        self.threads = ThreadGroup()
        self._name = name
        self._deadlines = deadlines or TransferDeadlines()
        self._limits = limits or ConnectionLimits()
        self._taps: Taps = NoTaps()
        self._pool = ConnectionPool(dialer, self._deadlines, self._limits)
        self._servers: list[PullServer] = []
        self._lock = threading.Lock()  # over the two below
        self._pulls: set[SocketPull] = set()
        self._is_closed = False

    def make_server(self, source: KvSource) -> PullServer:
        """Serves `source`, on the running loop, over whatever sockets it is given.

        Raises RuntimeError once closed.
        """
        if self._is_closed:
            raise RuntimeError("the transport is closed")
        gate = SourceGate(source, asyncio.get_running_loop())
        server = PullServer(self._name, gate, self._deadlines, self._limits, self.threads)
        server.taps = self._taps
        self._servers.append(server)
        return server

    def pull(self, address: str, request: OpenRequest, blocks: Sequence[memoryview]) -> SocketPull:
        views = as_blocks(blocks, must_be_writable=True)
        pull = SocketPull(self._name, self._pool, self._deadlines, address, request, views)
        with self._lock:
            if self._is_closed:
                pull.give_up(AbortedError("the transport is closed"))
                return pull
            self._pulls.add(pull)
        try:
            self.threads.start(f"{self._name}-pull", functools.partial(self._run, pull))
        except RuntimeError as error:
            pull.give_up(TransferError(str(error)))
            self._forget(pull)
        return pull

    def tap(self, taps: Taps) -> None:
        self._taps = self._pool.taps = taps
        for server in self._servers:
            server.taps = taps

    async def close(self) -> None:
        self.threads.close()
        with self._lock:
            self._is_closed = True
            pulls = list(self._pulls)
        for server in self._servers:
            server.shutdown()
        for pull in pulls:
            pull.abort()
        self._pool.close()
        # A thread may be in any one of these waits, none of which a cut connection ends.
        timeout_s = self._deadlines.connect_s + self._deadlines.open_s + self._deadlines.release_s
        if not await self.threads.join(timeout_s):
            logger.warning("%s: a transfer thread has not ended %.1f s after closing", self._name, timeout_s)

    def _run(self, pull: SocketPull) -> None:
        try:
            pull.run()
        finally:
            self._forget(pull)

    def _forget(self, pull: SocketPull) -> None:
        with self._lock:
            self._pulls.discard(pull)
