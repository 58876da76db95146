"""Which played workers the dispatcher asks, and what it says when there is none to ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pdserve_wire.errors import Reason, Unavailable
from pdserve_wire.messages import Accepted
from router.dispatcher import DispatchOptions
from tests.router.makers import until
from tests.router.played_workers import (
    GREEDY,
    KV_COMPLETE,
    LAYOUT,
    Event,
    PlayedCall,
    PlayedWorker,
    assert_whole,
    failing_with,
    honest_decode,
    played,
    tokens,
)


@pytest.mark.parametrize("reason", [Reason.BUSY, Reason.DRAINING, Reason.NO_ROOM])
async def test_what_one_decode_worker_cannot_take_another_takes_from_the_same_hand_off(reason: Reason) -> None:
    prefill = PlayedWorker("prefill")
    full = PlayedWorker("decode", failing_with(reason, "not here"), "full")
    async with played(prefill, full) as made:
        free = PlayedWorker("decode", honest_decode, "free")
        free.load = replace(free.load, num_running=9)  # so that the full one is asked first
        await made.join(free)
        assert_whole(await made.generate())
        assert [len(worker.calls) for worker in (prefill, full, free)] == [1, 1, 1]
        assert [call.pull_attempt for call in (*full.calls, *free.calls)] == [0, 1]
        assert full.calls[0].handoff == free.calls[0].handoff
        assert made.timelines[0].decode_worker == "free" and not made.timelines[0].resume_reasons


@pytest.mark.parametrize("busy_role", ["prefill", "decode"])
async def test_when_all_are_busy_each_is_asked_once_and_the_client_is_told_at_once(busy_role: str) -> None:
    busy = failing_with(Reason.BUSY, "full here")
    workers = [
        PlayedWorker(role, busy if role == busy_role else None, f"{role}-{number}")
        for role in ("prefill", "decode")
        for number in range(2)
    ]
    async with played(*workers) as made:
        with pytest.raises(Unavailable) as refusal:
            await made.generate()
        assert refusal.value.reason is Reason.BUSY
        assert [len(worker.calls) for worker in workers if worker.hello.role == busy_role] == [1, 1]


async def test_without_a_decode_worker_the_answer_comes_at_once_and_nothing_was_opened() -> None:
    prefill = PlayedWorker("prefill")
    async with played(prefill) as made:
        for sampling in (GREEDY, replace(GREEDY, max_tokens=1)):
            with pytest.raises(Unavailable, match="no decode worker is ready") as refusal:
                await made.generate(sampling)
            assert refusal.value.reason is Reason.NO_WORKER
        assert not prefill.calls


async def test_without_a_prefill_worker_decode_prefills_by_itself() -> None:
    decoding = PlayedWorker("decode")
    async with played(decoding) as made:
        assert_whole(await made.generate())
        assert decoding.calls[0].handoff is None
        assert made.timelines[0].decision == "local"


@pytest.mark.parametrize("is_there, why", [(False, "none is ready"), (True, "none has the model and KV layout")])
async def test_policy_may_forbid_that_decode_prefills_by_itself(is_there: bool, why: str) -> None:
    decoding = PlayedWorker("decode")
    prefill = [PlayedWorker("prefill", layout=replace(LAYOUT, block_size=32))] if is_there else []
    async with played(decoding, *prefill, options=DispatchOptions(no_prefill_policy="refuse")) as made:
        with pytest.raises(Unavailable, match=f"no prefill worker: {why}") as refusal:
            await made.generate()
        assert refusal.value.reason is Reason.NO_WORKER
        assert not decoding.calls and not any(worker.calls for worker in prefill)


@pytest.mark.parametrize("policy", ["local", "refuse"])
async def test_whole_requests_go_to_workers_of_both_roles_before_a_decode_worker(policy: str) -> None:
    both, decoding = PlayedWorker("both"), PlayedWorker("decode")
    async with played(both, decoding, options=DispatchOptions(no_prefill_policy=policy)) as made:
        for _ in range(4):
            assert_whole(await made.generate())
        assert (len(both.calls), len(decoding.calls)) == (4, 0)


async def test_of_two_revisions_only_workers_with_equal_layouts_are_paired() -> None:
    """faults: two revisions of workers at once."""
    newer = replace(LAYOUT, position_encoding="q")
    lonely = replace(LAYOUT, dtype="float32")
    workers = {
        (role, layout.position_encoding): PlayedWorker(role, None, f"{role}-{layout.position_encoding}", layout=layout)
        for layout in (LAYOUT, newer)
        for role in ("prefill", "decode")
    }
    stranger = PlayedWorker("prefill", worker_id="stranger", layout=lonely)
    other_model = PlayedWorker("both", worker_id="other", model="other")
    async with played(*workers.values(), stranger, other_model) as made:
        for _ in range(12):
            assert_whole(await made.generate())
            timeline = made.timelines[-1]
            assert timeline.prefill_worker.removeprefix("prefill") == timeline.decode_worker.removeprefix("decode")
            assert timeline.decision == "remote"
        assert not stranger.calls and not other_model.calls
        with pytest.raises(Unavailable, match="no decode worker is ready"):
            await made.generate(model="a third")


async def test_a_hundred_requests_in_one_tick_spread_evenly_over_both_pools() -> None:
    """faults: 100 requests in one tick over four decode workers: largest minus smallest <= 2."""
    release = asyncio.Event()

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        await release.wait()
        yield KV_COMPLETE
        for event in tokens(call, 0):
            yield event

    prefill = [PlayedWorker("prefill", None, f"p{number}") for number in range(4)]
    decoding = [PlayedWorker("decode", decode, f"d{number}") for number in range(4)]
    async with played(*prefill, *decoding) as made:
        answers = [made.begin() for _ in range(100)]
        await until(lambda: sum(len(worker.calls) for worker in decoding) == 100)
        for pool in (prefill, decoding):
            counts = [len(worker.calls) for worker in pool]
            assert sum(counts) == 100 and max(counts) - min(counts) <= 2, counts
        release.set()
        for answer in answers:
            assert_whole(await answer)


async def test_more_requests_than_the_bound_are_told_to_come_later() -> None:
    release = asyncio.Event()

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        await release.wait()
        async for event in honest_decode(call):
            yield event

    async with played(PlayedWorker("decode", decode), options=DispatchOptions(max_requests=2)) as made:
        answers = [made.begin() for _ in range(2)]
        await until(lambda: made.dispatcher.num_in_flight == 2)
        with pytest.raises(Unavailable, match="retry") as refusal:
            await made.generate()
        assert refusal.value.reason is Reason.BUSY
        release.set()
        for answer in answers:
            assert_whole(await answer)
        assert_whole(await made.generate())


async def test_a_router_that_drains_finishes_what_it_has_and_takes_nothing_new() -> None:
    release = asyncio.Event()

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        await release.wait()
        async for event in honest_decode(call):
            yield event

    async with played(PlayedWorker("decode", decode)) as made:
        await asyncio.wait_for(made.dispatcher.wait_idle(), 1)
        answer = made.begin()
        await until(lambda: made.dispatcher.num_in_flight == 1)
        made.dispatcher.is_draining = True
        with pytest.raises(Unavailable, match="shutting down") as refusal:
            await made.generate()
        assert refusal.value.reason is Reason.DRAINING
        idle = asyncio.create_task(made.dispatcher.wait_idle())
        await asyncio.sleep(0.01)
        assert not idle.done()
        release.set()
        assert_whole(await answer)
        await asyncio.wait_for(idle, 1)
