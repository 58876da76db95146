"""Tell several waiters on one event loop that something changed."""

from __future__ import annotations

import asyncio


class Signal:
    """Each subscriber has an `asyncio.Event` of its own, to wait on and clear as it likes."""

    def __init__(self) -> None:
        self._events: list[asyncio.Event] = []

    def subscribe(self, event: asyncio.Event | None = None) -> asyncio.Event:
        event = event or asyncio.Event()
        self._events.append(event)
        return event

    def notify(self) -> None:
        for event in self._events:
            event.set()
