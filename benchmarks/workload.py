"""What is sent to a server in one round, and the sending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.client import Ask, Client, RawReply
from benchmarks.machine import CpuClock
from benchmarks.prompts import Prompts
from benchmarks.round import Round, summarize, summarize_long

NewCpuClock = Callable[[], CpuClock]


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """Long prompts that arrive beside the streams, one each `interval_s`, whether or not the last is answered."""

    num_tokens: int = 1300
    interval_s: float = 5.0
    max_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """Streams in a closed loop: each sends its next request when its last is answered.

    The round ends when `num_requests` are answered, or after `duration_s` if that is set. With
    `long_prompts` it needs a duration, and the figures are those of the streams alone.
    """

    name: str  # of the row
    num_streams: int
    num_requests: int
    prompt_tokens: int
    ask: Ask
    duration_s: float | None = None
    long_prompts: LongPrompts | None = None

    def warm_up(self, num_requests: int) -> Workload:
        """The same with other prompts, and less of it."""
        ask = replace(self.ask, max_tokens=min(8, self.ask.max_tokens))
        return replace(self, num_requests=num_requests, ask=ask, duration_s=None, long_prompts=None)


async def run(client: Client, workload: Workload, prompts: Prompts, new_clock: NewCpuClock = CpuClock) -> Round:
    """One round. Replies are read after its end."""
    long_replies: list[RawReply] = []
    clock, started_at = new_clock(), time.monotonic()
    replies = await _send(client, workload, prompts, long_replies)
    duration_s, cpu = time.monotonic() - started_at, clock.read()
    figures = summarize([reply.read() for reply in replies], duration_s, cpu)
    if workload.long_prompts is None:
        return figures
    return replace(figures, long_prompts=summarize_long([reply.read() for reply in long_replies]))


async def _send(client: Client, workload: Workload, prompts: Prompts, long_replies: list[RawReply]) -> list[RawReply]:
    """The streams' replies; those of the long prompts go to `long_replies`."""
    if workload.duration_s is None:
        texts = [prompts.make(workload.prompt_tokens) for _ in range(workload.num_requests)]
        return await _closed_loop(client, workload, iter(texts))
    ends_at = time.monotonic() + workload.duration_s
    async with asyncio.TaskGroup() as group:
        arriving: asyncio.Task[None] | None = None
        if (beside := workload.long_prompts) is not None:
            long_texts = _until(ends_at, prompts, beside.num_tokens)
            arriving = group.create_task(_arrivals(client, beside, workload.ask, long_texts, long_replies))
        replies = await _closed_loop(client, workload, _until(ends_at, prompts, workload.prompt_tokens))
        if arriving is not None:
            arriving.cancel()
    return replies


async def _closed_loop(client: Client, workload: Workload, texts: Iterator[str]) -> list[RawReply]:
    """The streams take their prompts from one iterator, so that none is idle before it is empty."""
    replies: list[RawReply] = []

    async def stream() -> None:
        for text in texts:
            replies.append(await client.ask(text, workload.ask))

    async with asyncio.TaskGroup() as group:
        for _ in range(workload.num_streams):
            group.create_task(stream())
    return replies


def _until(ends_at: float, prompts: Prompts, num_tokens: int) -> Iterator[str]:
    while time.monotonic() < ends_at:
        yield prompts.make(num_tokens)


async def _arrivals(
    client: Client, long_prompts: LongPrompts, ask: Ask, texts: Iterator[str], replies: list[RawReply]
) -> None:
    """Until `texts` ends and all are answered. When it is cancelled, what is on its way is given up."""
    ask = replace(ask, max_tokens=long_prompts.max_tokens)

    async def send(text: str) -> None:
        replies.append(await client.ask(text, ask))

    async with asyncio.TaskGroup() as group:
        for text in texts:
            group.create_task(send(text))
            await asyncio.sleep(long_prompts.interval_s)
