"""The client leaves, or is slow, at every point: both calls are closed at once, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from pdserve_wire.errors import Reason
from pdserve_wire.messages import Accepted, Token
from tests.router.makers import until
from tests.router.played_workers import (
    KV_COMPLETE,
    Event,
    Played,
    PlayedCall,
    PlayedWorker,
    Script,
    assert_whole,
    failing_with,
    forever,
    honest_decode,
    honest_prefill,
    played,
    readers,
    silent,
    started,
    tokens,
)


async def only_started(call: PlayedCall) -> AsyncIterator[Event]:
    yield started(call)
    await forever()


async def only_accepted(call: PlayedCall) -> AsyncIterator[Event]:
    yield Accepted()
    await forever()


async def two_tokens(call: PlayedCall) -> AsyncIterator[Event]:
    yield Accepted()
    if call.handoff is not None:
        yield KV_COMPLETE
    for event in tokens(call, 0, 2):
        yield event
    await forever()


@dataclass(frozen=True, slots=True)
class Point:
    """Where a request is when its client leaves. `num_open` calls are open there, over both pools."""

    prefill: Script | None
    decode: Script
    num_open: int
    is_reached: Callable[[Played], bool]


POINTS = {
    "prefill has not started": Point(silent, honest_decode, 1, lambda made: True),
    "decode has not accepted": Point(honest_prefill, silent, 2, lambda made: made.timelines[0].prefill is not None),
    "decode has no room and prefill no token": Point(only_started, only_accepted, 2, lambda made: True),
    "the kv is being pulled": Point(
        honest_prefill, only_accepted, 2, lambda made: made.timelines[0].num_output_tokens == 1
    ),
    "between two tokens": Point(honest_prefill, two_tokens, 1, lambda made: made.timelines[0].num_output_tokens == 2),
    "decode prefills by itself": Point(None, silent, 1, lambda made: True),
    "between two tokens of a local prefill": Point(
        None, two_tokens, 1, lambda made: made.timelines[0].num_output_tokens == 2
    ),
    "in the pause before another attempt": Point(
        None,
        failing_with(Reason.INTERNAL, "the engine broke"),
        0,
        lambda made: made.timelines[0].num_resumes == 3,
    ),
}


def running() -> Counter[str]:
    """How many tasks there are of each kind."""
    return Counter(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())


@pytest.mark.parametrize("name", POINTS)
async def test_a_client_that_leaves_closes_both_calls_at_once(name: str) -> None:
    point = POINTS[name]
    workers = [PlayedWorker("decode", point.decode)]
    if point.prefill is not None:
        workers.append(PlayedWorker("prefill", point.prefill))
    async with played(*workers) as made:
        before = running()
        client = made.begin()
        await until(lambda: point.is_reached(made) and sum(worker.num_open for worker in workers) == point.num_open)
        open_calls = [call for worker in workers for call in worker.calls if not call.ended.is_set()]
        assert made.dispatcher.num_in_flight == 1
        client.cancel()
        await asyncio.wait([client])
        assert client.cancelled() and made.dispatcher.num_in_flight == 0
        assert not any(worker.num_in_flight for worker in made.fleet.workers)
        async with asyncio.timeout(1):
            for call in open_calls:
                await call.ended.wait()
        assert all(call.was_cancelled for call in open_calls)
        await until(lambda: running() <= before)


async def test_a_client_that_closes_the_stream_between_two_tokens_closes_the_call_at_once() -> None:
    decoding = PlayedWorker("decode", two_tokens)
    async with played(decoding, PlayedWorker("prefill")) as made:
        stream = made.stream()
        await anext(stream)
        await stream.aclose()
        assert made.dispatcher.num_in_flight == 0 and not any(w.num_in_flight for w in made.fleet.workers)
        await asyncio.sleep(0)
        assert not readers()


async def test_a_stream_that_was_never_read_opens_and_counts_nothing() -> None:
    decoding = PlayedWorker("decode")
    async with played(decoding) as made:
        await made.stream().aclose()
        assert made.dispatcher.num_in_flight == 0 and not decoding.calls


async def test_a_slow_client_gets_every_token_in_order() -> None:
    async with played(PlayedWorker("prefill"), PlayedWorker("decode")) as made:
        received: list[Token] = []
        async for batch in made.stream():
            received += batch
            await asyncio.sleep(0.02)
        assert_whole(received)


async def test_many_clients_that_leave_at_random_moments_leave_nothing_behind() -> None:
    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        await asyncio.sleep(0.01)
        yield KV_COMPLETE
        for event in tokens(call, 0):
            yield event
            await asyncio.sleep(0.005)

    prefill = [PlayedWorker("prefill", None, f"p{number}") for number in range(2)]
    decoding = [PlayedWorker("decode", decode, f"d{number}") for number in range(2)]
    async with played(*prefill, *decoding) as made:
        clients = [made.begin() for _ in range(100)]
        for number, client in enumerate(clients):
            if number % 2:
                asyncio.get_running_loop().call_later(number / 1000, client.cancel)
        ends = await asyncio.gather(*clients, return_exceptions=True)
        for number, end in enumerate(ends):
            if isinstance(end, list):
                assert_whole(end)
            else:
                assert number % 2 and isinstance(end, asyncio.CancelledError)
