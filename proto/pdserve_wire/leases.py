"""Calls that a worker serves, by the router whose lease they are.

A router whose loop is stuck still answers pings, so its calls stay open; but its beat stops. A worker
that misses it ends that router's calls, and so gives back what they hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet


class Leases:
    """Tasks that serve calls, by router. Used on one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, set[asyncio.Task[object]]] = {}
        self._ended: WeakSet[asyncio.Task[object]] = WeakSet()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return sum(len(tasks) for tasks in self._tasks.values())

    @contextmanager
    def lease(self, router_id: str) -> Iterator[None]:
        """Count the current task as `router_id`'s while the block runs."""
        task = asyncio.current_task()
        assert task is not None
        tasks = self._tasks.setdefault(router_id, set())
        tasks.add(task)
        self._empty.clear()
        try:
            yield
        finally:
            tasks.discard(task)
            if not tasks:
                self._tasks.pop(router_id, None)
            if not self._tasks:
                self._empty.set()

    def end(self, router_id: str) -> int:
        """Cancel every call of a router; returns how many there were."""
        tasks = list(self._tasks.get(router_id, ()))
        for task in tasks:
            self._ended.add(task)
            task.cancel()
        return len(tasks)

    def has_ended(self, task: asyncio.Task[object] | None) -> bool:
        """Whether it was `end` that cancelled the task, and not its caller who left."""
        return task in self._ended

    def end_all(self) -> int:
        return sum(self.end(router_id) for router_id in list(self._tasks))

    async def wait_empty(self) -> None:
        await self._empty.wait()
