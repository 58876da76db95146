"""What a sequence's owner reads: one item for each step that touched the sequence."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token as the sampler chose it; logprobs only where they were asked for."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one sequence. `started_at` and `ended_at` are `time.monotonic()`."""

    tokens: tuple[SampledToken, ...]
    num_computed_tokens: int
    step: int
    started_at: float
    ended_at: float
    finish_reason: str | None = None


class OutputStream:
    """A queue with one writer (the engine loop) and one reader, on one event loop.

    Bounded by the sequence's own length: one item a step. An exception put last ends the stream.
    """

    __slots__ = ("_error", "_items", "_wake", "started", "started_at")

    def __init__(self) -> None:
        self.started = asyncio.Event()  # set when the sequence gets its blocks and its first step
        self.started_at = 0.0  # time.monotonic() of that moment
        self._items: deque[StepOutput] = deque()
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def start(self, now: float) -> None:
        """The sequence runs; a second start, after a preemption, changes nothing."""
        if not self.started.is_set():
            self.started_at = now
            self.started.set()

    def put(self, item: StepOutput) -> None:
        self._items.append(item)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake.set()
        self.started.set()

    async def get(self) -> list[StepOutput]:
        """All items since the last call, at least one, oldest first. Raises what `fail` was given."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        items = list(self._items)
        self._items.clear()
        return items
