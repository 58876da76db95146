"""Room at decode: a request reserves all the blocks of its prompt and a place to run, or waits and
holds nothing.

waiting --(room: blocks and a place to run)--> reserved --> pulling --> running

Whoever waits is served by priority, then in order of arrival; the first that does not fit stops those
behind it, so that a large prompt is not starved by small ones.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field

from engine.block_pool import Holder
from engine.scheduler import Scheduler


@dataclass(slots=True, order=True)
class _Waiter:
    priority: int
    arrival: int
    num_tokens: int = field(compare=False)
    granted: asyncio.Future[list[int]] = field(compare=False)


class Reservations:
    """Blocks for sequences whose KV will arrive from elsewhere. Lives on the event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: list[_Waiter] = []
        self._arrivals = itertools.count()
        self._room = scheduler.pool.freed.subscribe()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_pending(self) -> int:
        """Granted, and not running yet."""
        return self._scheduler.num_reserved

    async def reserve(self, num_tokens: int, priority: int) -> list[int]:
        """Wait for the blocks of `num_tokens`, held as `WRITING`. Pair it with `settle`.

        Cancelling the wait gives back whatever was granted.
        """
        waiter = _Waiter(priority, next(self._arrivals), num_tokens, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, waiter)
        self._grant()
        try:
            return await asyncio.shield(waiter.granted)
        except asyncio.CancelledError:
            if waiter.granted.done():
                self._scheduler.pool.release(waiter.granted.result(), Holder.WRITING)
                self.settle()
            else:
                self._waiting.remove(waiter)
                heapq.heapify(self._waiting)
                waiter.granted.cancel()
                self._grant()
            raise

    def settle(self) -> None:
        """The reservation has become a running sequence by now, or is given back."""
        self._scheduler.settle()
        self._grant()

    async def serve(self) -> None:
        """Hand out room whenever some comes back, until cancelled."""
        while True:
            await self._room.wait()
            self._room.clear()
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            blocks = self._scheduler.reserve(self._waiting[0].num_tokens, Holder.WRITING)
            if blocks is None:
                return
            heapq.heappop(self._waiting).granted.set_result(blocks)
