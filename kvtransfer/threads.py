"""Between transfer threads and the event loop: a latch to await, and a group of threads to end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable


class Latch:
    """Set once, from any thread; awaited from any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._lock:
            self._is_set = True
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:  # that loop is closed: nobody waits there any more
                continue

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it was set in time. Never raises for a timeout."""
        loop = asyncio.get_running_loop()
        waiter = (loop, loop.create_future())
        with self._lock:
            if self._is_set:
                return True
            self._waiters.append(waiter)
        try:
            await asyncio.wait([waiter[1]], timeout=timeout_s)
        finally:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return self._is_set


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class ThreadGroup:
    """The daemon threads of one transport. Once closed it starts no more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latches: dict[threading.Thread, Latch] = {}
        self._is_closed = False

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Raises RuntimeError when the group is closed, or the system gives no more threads."""
        latch = Latch()

        def run() -> None:
            try:
                target()
            finally:
                with self._lock:
                    self._latches.pop(thread, None)
                latch.set()

        thread = threading.Thread(target=run, name=f"kvtransfer-{name}", daemon=True)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the transport is closed")
            self._latches[thread] = latch
            try:
                thread.start()
            except RuntimeError:
                del self._latches[thread]
                raise

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    async def join(self, timeout_s: float) -> bool:
        """Whether every thread has ended in time. What they told the loop has then been done."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            latches = dict(self._latches)
        for thread, latch in latches.items():
            if not await latch.wait(max(0.0, deadline - time.monotonic())):
                return False
            thread.join(timeout_s)  # its work is over; this waits for its last instructions only
        await asyncio.sleep(0)  # lets the callbacks run that a thread has queued before it ended
        return True
