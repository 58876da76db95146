"""From a transfer thread to the `KvSource` on its event loop, and never the other way round."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading

from kvtransfer.errors import PeerSilentError, RefusedError, TransferError
from kvtransfer.messages import OpenRequest
from kvtransfer.outgoing import Outgoing
from kvtransfer.transport import KvSource

logger = logging.getLogger(__name__)


class SourceGate:
    """Takes care that each `Outgoing` that the source opened is closed exactly once, also when the loop
    answers after the thread has given up.
    """

    def __init__(self, source: KvSource, loop: asyncio.AbstractEventLoop) -> None:
        self._source = source
        self._loop = loop

    def open(self, request: OpenRequest, timeout_s: float) -> Outgoing:
        """Blocks. Raises `RefusedError`, or `PeerSilentError` when the loop doesn't answer in time."""
        ticket = _Ticket()
        coroutine = self._open(request, ticket)
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise PeerSilentError("the serving loop is closed") from None
        concurrent.futures.wait([future], timeout_s)
        outgoing = ticket.collect()
        if outgoing is not None:
            return outgoing
        if not future.done():
            raise PeerSilentError("the serving loop did not answer OPEN in time")
        error = None if future.cancelled() else future.exception()
        if isinstance(error, RefusedError):
            raise error
        logger.error("opening a hand-off failed", exc_info=error)
        raise RefusedError("source", "internal")

    def closed(self, outgoing: Outgoing, error: TransferError | None) -> None:
        """Does not wait for the loop. The memory must be released already."""
        if error is not None:
            error.forget_frames()
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the source's world
            self._loop.call_soon_threadsafe(self._source.closed, outgoing, error)

    async def _open(self, request: OpenRequest, ticket: _Ticket) -> None:
        outgoing = await self._source.open(request)
        if not ticket.deliver(outgoing):
            outgoing.mark_released()
            self._source.closed(outgoing, PeerSilentError("opened too late"))


class _Ticket:
    """Hands one `Outgoing` from the loop to a thread that may have left: one of the two has it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outgoing: Outgoing | None = None
        self._is_collected = False

    def deliver(self, outgoing: Outgoing) -> bool:
        with self._lock:
            if self._is_collected:
                return False
            self._outgoing = outgoing
            return True

    def collect(self) -> Outgoing | None:
        with self._lock:
            self._is_collected = True
            return self._outgoing
