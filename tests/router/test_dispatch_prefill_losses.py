"""What prefill loses is rebuilt: its workers die in every phase of a request, and KV is lost on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from engine.sampling import SamplingParams
from pdserve_wire.deadlines import DEADLINES
from pdserve_wire.errors import Reason, Unavailable
from pdserve_wire.messages import Accepted
from router.attempt import MAX_PULLS
from tests.router.makers import until
from tests.router.played_workers import (
    GREEDY,
    KV_COMPLETE,
    LAYOUT,
    PROMPT,
    Event,
    PlayedCall,
    PlayedWorker,
    assert_whole,
    first,
    forever,
    honest_decode,
    honest_prefill,
    played,
    silent,
    started,
    tokens,
)

SEEDED = SamplingParams(max_tokens=5, temperature=0.8, seed=77)


def kv_lost() -> Unavailable:
    return Unavailable(Reason.KV_LOST, "peer closed")


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> float:
    """How long, at most, a decode worker may leave open whether it has the KV of a prefill that is gone."""
    monkeypatch.setattr("router.attempt.DEADLINES", replace(DEADLINES, peer_timeout_s=0.2, open_s=0.1))
    return 0.3


async def test_kv_that_is_lost_is_pulled_again_a_few_times_and_then_everything_is_built_again() -> None:
    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        if call.request.generation == 0:
            await until(lambda: made.timelines[0].num_output_tokens == 1)
            raise kv_lost()
        async for event in honest_decode(call):
            yield event

    prefill, decoding = PlayedWorker("prefill"), PlayedWorker("decode", decode)
    async with played(prefill, decoding) as made:
        assert_whole(await made.generate())
        assert [(call.request.generation, call.pull_attempt) for call in decoding.calls] == [
            *((0, attempt) for attempt in range(MAX_PULLS)),
            (1, 0),
        ]
        assert len({call.handoff.handoff_id for call in decoding.calls[:MAX_PULLS] if call.handoff}) == 1
        assert prefill.calls[1].request.token_ids == (*PROMPT, 1000)
        assert made.timelines[0].resume_reasons == [Reason.KV_LOST]


async def test_kv_that_two_workers_lose_again_and_again_is_not_sought_from_them_next() -> None:
    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        assert call.handoff is not None
        if made.timelines[0].prefill_worker == "bad":
            raise kv_lost()
        async for event in honest_decode(call):
            yield event

    bad = PlayedWorker("prefill", None, "bad")
    async with played(bad, PlayedWorker("decode", decode, "d0"), PlayedWorker("decode", decode, "d1")) as made:
        good = PlayedWorker("prefill", None, "good")
        good.load = replace(good.load, num_running=9)  # so that the bad one is asked first
        await made.join(good)
        assert_whole(await made.generate())
        assert (len(bad.calls), len(good.calls)) == (1, 1)


async def test_kv_is_not_sought_again_from_a_prefill_that_is_not_heard_of() -> None:
    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        if call.request.generation == 0:
            next(worker for worker in made.fleet.workers if worker.hello.role == "prefill").beat_at -= 4.0
            raise kv_lost()
        async for event in honest_decode(call):
            yield event

    decoding = PlayedWorker("decode", decode)
    async with played(PlayedWorker("prefill"), decoding) as made:
        assert_whole(await made.generate())
        assert [(call.request.generation, call.pull_attempt) for call in decoding.calls] == [(0, 0), (1, 0)]


@pytest.mark.parametrize("has_another", [True, False])
async def test_a_prefill_that_dies_before_it_started_is_replaced_or_decode_prefills(has_another: bool) -> None:
    dying, decoding = PlayedWorker("prefill", silent, "dying"), PlayedWorker("decode")
    async with played(dying, decoding) as made:
        other = PlayedWorker("prefill", None, "other")
        other.load = replace(other.load, num_running=9)
        if has_another:
            await made.join(other)
        answer = made.begin()
        await until(lambda: bool(dying.calls))
        await dying.die()
        assert_whole(await answer)
        assert len(other.calls) == has_another and len(decoding.calls) == 1
        assert (decoding.calls[0].handoff is not None) == has_another


async def test_a_prefill_that_dies_with_the_only_token_is_replaced() -> None:
    async def prefill(call: PlayedCall) -> AsyncIterator[Event]:
        yield started(call)
        await forever()

    dying, decoding = PlayedWorker("prefill", prefill, "dying"), PlayedWorker("decode")
    async with played(dying, decoding) as made:
        answer = made.begin(replace(GREEDY, max_tokens=1))
        await until(lambda: bool(dying.calls))
        await made.join(PlayedWorker("prefill", None, "other"))
        await dying.die()
        assert_whole(await answer, 1)
        assert not decoding.calls


@pytest.mark.parametrize("outcome", ["complete", "lost", "silent"])
async def test_a_prefill_that_dies_while_its_kv_is_pulled_is_waited_for_a_while(
    outcome: str, short_wait: float
) -> None:
    is_gone = asyncio.Event()

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        if call.handoff is not None:
            await is_gone.wait()
            if outcome == "lost":
                raise kv_lost()
            if outcome == "silent":
                await forever()
            yield KV_COMPLETE
            await asyncio.sleep(1.5 * short_wait)  # nothing is waited for any more
        for event in tokens(call, call.request.num_emitted_tokens):
            yield event

    prefill, decoding = PlayedWorker("prefill"), PlayedWorker("decode", decode)
    async with played(prefill, decoding) as made:
        answer = made.begin(SEEDED)
        await until(lambda: made.timelines[0].num_output_tokens == 1)
        await prefill.die()
        is_gone.set()
        assert_whole(await answer)
        if outcome == "complete":
            assert len(decoding.calls) == 1 and not made.timelines[0].resume_reasons
        else:
            assert made.timelines[0].resume_reasons == [Reason.KV_LOST]
            again = decoding.calls[1]
            assert again.handoff is None, "no prefill worker is left"
            assert again.request.token_ids == (*PROMPT, 1000) and again.request.num_emitted_tokens == 1


async def test_a_prefill_that_dies_after_the_kv_is_complete_changes_nothing_for_a_slow_client(
    short_wait: float,
) -> None:
    """The client takes its time over the first token; both the end of the pull and the death wait in line."""
    has_read, may_die = asyncio.Event(), asyncio.Event()

    async def prefill(call: PlayedCall) -> AsyncIterator[Event]:
        yield started(call)
        yield first(call)
        await may_die.wait()
        raise Unavailable(Reason.INTERNAL, "the engine broke")

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        await may_complete.wait()
        yield KV_COMPLETE
        may_die.set()
        await has_read.wait()
        await asyncio.sleep(1.5 * short_wait)
        for event in tokens(call, 0):
            yield event

    may_complete = asyncio.Event()
    prefilling = PlayedWorker("prefill", prefill)
    async with played(prefilling, PlayedWorker("decode", decode)) as made:
        stream = made.stream()
        received = list(await anext(stream))
        may_complete.set()
        await asyncio.wait_for(prefilling.calls[0].ended.wait(), 5)
        await asyncio.sleep(0.1)
        has_read.set()
        async for batch in stream:
            received += batch
        assert_whole(received)
        assert not made.timelines[0].resume_reasons


async def test_kv_that_came_in_time_is_not_lost_because_the_client_reads_late(short_wait: float) -> None:
    has_failed = asyncio.Event()

    async def prefill(call: PlayedCall) -> AsyncIterator[Event]:
        yield started(call)
        yield first(call)
        await until(lambda: bool(decoding.calls))
        raise Unavailable(Reason.INTERNAL, "the engine broke")

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        await until(prefilling.calls[0].ended.is_set)
        await asyncio.sleep(0.05)
        yield Accepted()
        yield KV_COMPLETE
        await has_failed.wait()
        for event in tokens(call, 0):
            yield event

    prefilling, decoding = PlayedWorker("prefill", prefill), PlayedWorker("decode", decode)
    async with played(prefilling, decoding) as made:
        stream = made.stream()
        received = list(await anext(stream))
        await asyncio.sleep(1.5 * short_wait)
        has_failed.set()
        async for batch in stream:
            received += batch
        assert_whole(received)
        assert not made.timelines[0].resume_reasons


async def test_a_prefill_whose_last_partner_left_leads_to_a_pair_that_is_there() -> None:
    """During a change of revisions the partner may be gone when the prompt is started."""
    may_start = asyncio.Event()

    async def prefill(call: PlayedCall) -> AsyncIterator[Event]:
        await may_start.wait()
        async for event in honest_prefill(call):
            yield event

    newer = replace(LAYOUT, position_encoding="q")
    leaving = PlayedWorker("decode", None, "leaving")
    async with played(PlayedWorker("prefill", prefill, "old"), leaving) as made:
        answer = made.begin()
        await until(lambda: made.timelines[0].prefill_worker == "old")
        await made.join(
            PlayedWorker("prefill", None, "p", layout=newer), PlayedWorker("decode", None, "d", layout=newer)
        )
        await leaving.die()
        await until(lambda: len(made.fleet.ready("decode")) == 1)
        may_start.set()
        assert_whole(await answer)
        assert (made.timelines[0].prefill_worker, made.timelines[0].decode_worker) == ("p", "d")
