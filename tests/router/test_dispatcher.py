"""The dispatcher against played workers: the order of events, ends, refusals, and what it opens and closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pdserve_wire.errors import Reason, Refused, Unavailable
from pdserve_wire.messages import Accepted, First, PrefillTimings, Started, Token, Tokens
from router.dispatcher import DispatchOptions
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
    failing_with,
    first,
    forever,
    honest_decode,
    played,
    started,
    token_at,
    tokens,
)


async def test_tokens_come_in_order_prefill_is_closed_when_decode_has_the_kv_and_nothing_is_left_open() -> None:
    may_decode = asyncio.Event()

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        yield KV_COMPLETE
        await may_decode.wait()
        for event in tokens(call, 0):
            yield event

    prefill, decoding = PlayedWorker("prefill"), PlayedWorker("decode", decode)
    async with played(prefill, decoding) as made:
        answer = asyncio.create_task(made.generate())
        await until(lambda: bool(decoding.calls))
        await asyncio.wait_for(prefill.calls[0].ended.wait(), 5)
        assert prefill.calls[0].was_cancelled and not decoding.calls[0].ended.is_set()
        may_decode.set()
        assert_whole(await answer)
        (timeline,) = made.timelines
        assert (timeline.decision, timeline.prefill_worker, timeline.decode_worker) == ("remote", "prefill", "decode")
        assert timeline.transfer == KV_COMPLETE and timeline.prefill == PrefillTimings(num_chunks=1)
        assert timeline.num_mismatches == 0 and not timeline.resume_reasons
        assert decoding.calls[0].handoff == started(prefill.calls[0]).handoff


async def test_tokens_flow_though_prefills_own_reply_is_withheld() -> None:
    """faults: prefill's own reply is withheld."""

    async def prefill(call: PlayedCall) -> AsyncIterator[Event]:
        yield started(call)
        await forever()

    async with played(PlayedWorker("prefill", prefill), PlayedWorker("decode")) as made:
        assert_whole(await made.generate())


@pytest.mark.parametrize("other_id, num_mismatches", [(1000, 0), (7, 1)])
@pytest.mark.parametrize("is_prefill_first", [True, False])
async def test_of_two_first_tokens_the_first_to_come_stands(
    is_prefill_first: bool, other_id: int, num_mismatches: int
) -> None:
    received: list[Token] = []

    async def prefill(call: PlayedCall) -> AsyncIterator[Event]:
        yield started(call)
        if not is_prefill_first:
            await until(lambda: bool(received))
        yield First((Token(0, 1000 if is_prefill_first else other_id),), PrefillTimings())
        await forever()

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        if is_prefill_first:
            await until(lambda: bool(received))
        yield Tokens((Token(0, other_id if is_prefill_first else 1000),))
        if not is_prefill_first:
            await until(lambda: made.timelines[0].prefill is not None)
        yield KV_COMPLETE
        for event in tokens(call, 1):
            yield event

    async with played(PlayedWorker("prefill", prefill), PlayedWorker("decode", decode)) as made:
        async for batch in made.stream():
            received += batch
        assert_whole(received)
        assert made.timelines[0].num_mismatches == num_mismatches


async def test_the_first_token_waits_until_decode_has_accepted() -> None:
    may_accept = asyncio.Event()

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        await may_accept.wait()
        yield Accepted()
        await forever()

    async with played(PlayedWorker("prefill"), PlayedWorker("decode", decode)) as made:
        stream = made.stream()
        first_batch = asyncio.create_task(anext(stream))
        await until(lambda: made.timelines[0].prefill is not None)
        await asyncio.sleep(0.05)
        assert not first_batch.done()
        may_accept.set()
        assert [token.index for token in await asyncio.wait_for(first_batch, 5)] == [0]
        await stream.aclose()


@pytest.mark.parametrize("has_accepted", [True, False])
async def test_a_first_token_that_ends_the_request_is_delivered_and_decode_is_closed(has_accepted: bool) -> None:
    async def prefill(call: PlayedCall) -> AsyncIterator[Event]:
        yield started(call)
        await until(lambda: bool(decoding.calls))
        yield First((Token(0, 2, finish_reason="stop"),), PrefillTimings())
        await forever()

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        if has_accepted:
            yield Accepted()
        await forever()
        yield

    decoding = PlayedWorker("decode", decode)
    async with played(PlayedWorker("prefill", prefill), decoding) as made:
        assert [(token.token_id, token.finish_reason) for token in await made.generate()] == [(2, "stop")]
        await asyncio.wait_for(decoding.calls[0].ended.wait(), 5)
        assert decoding.calls[0].was_cancelled


async def test_for_one_token_decode_is_never_opened() -> None:
    decoding = PlayedWorker("decode")
    async with played(PlayedWorker("prefill"), decoding) as made:
        assert_whole(await made.generate(replace(GREEDY, max_tokens=1)), 1)
        assert not decoding.calls


async def test_for_the_one_token_that_is_left_after_a_loss_decode_is_not_opened_again() -> None:
    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        yield KV_COMPLETE
        for event in tokens(call, 0, end=4):
            yield event
        raise Unavailable(Reason.INTERNAL, "the engine broke")

    prefill, decoding = PlayedWorker("prefill"), PlayedWorker("decode", decode)
    async with played(prefill, decoding) as made:
        assert_whole(await made.generate())
        assert len(decoding.calls) == 1
        assert prefill.calls[1].request.token_ids == (*PROMPT, 1000, 1001, 1002, 1003)


async def test_a_refusal_of_decode_reaches_the_client_before_any_token_and_prefill_is_released() -> None:
    """faults: decode refuses before its scheduler sees the request after prefill is done."""
    prefill = PlayedWorker("prefill")

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        await until(lambda: made.timelines[0].prefill is not None)
        raise Refused("top_k: this worker knows better")
        yield

    async with played(prefill, PlayedWorker("decode", decode)) as made:
        received: list[Token] = []
        with pytest.raises(Refused, match="knows better"):
            async for batch in made.stream():
                received += batch
        assert not received and len(prefill.calls) == 1
        await asyncio.wait_for(prefill.calls[0].ended.wait(), 5)


async def test_a_refusal_of_prefill_reaches_the_client_and_is_not_tried_elsewhere() -> None:
    prefill = [PlayedWorker("prefill", failing_with(Refused("too long")), f"p{number}") for number in range(2)]
    async with played(*prefill, PlayedWorker("decode")) as made:
        with pytest.raises(Refused, match="too long"):
            await made.generate()
        assert sum(len(worker.calls) for worker in prefill) == 1


@pytest.mark.parametrize("reason", [Reason.BUSY, Reason.DRAINING, Reason.NO_ROOM])
async def test_what_one_decode_worker_cannot_take_another_takes_from_the_same_hand_off(reason: Reason) -> None:
    prefill = PlayedWorker("prefill")
    full = PlayedWorker("decode", failing_with(Unavailable(reason, "not here")), "full")
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
    busy = failing_with(Unavailable(Reason.BUSY, "full here"))
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


@pytest.mark.parametrize("layout, why", [(None, "none is ready"), (replace(LAYOUT, block_size=32), "model and KV layout")])
async def test_policy_may_forbid_that_decode_prefills_by_itself(layout: object, why: str) -> None:
    decoding = PlayedWorker("decode")
    prefill = [] if layout is None else [PlayedWorker("prefill", layout=layout)]  # type: ignore[arg-type]
    async with played(decoding, *prefill, options=DispatchOptions(no_prefill_policy="refuse")) as made:
        with pytest.raises(Unavailable, match=f"no prefill worker: .*{why}") as refusal:
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
        with pytest.raises(Unavailable, match="no decode worker"):
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
        answers = [asyncio.create_task(made.generate()) for _ in range(100)]
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
        answers = [asyncio.create_task(made.generate()) for _ in range(2)]
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
        answer = asyncio.create_task(made.generate())
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


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
async def test_a_deadline_in_the_past_opens_nothing(timeout_s: float) -> None:
    decoding = PlayedWorker("decode")
    async with played(decoding) as made:
        with pytest.raises(Unavailable) as refusal:
            await made.generate(timeout_s=timeout_s)
        assert refusal.value.reason is Reason.NO_ROOM and not decoding.calls


async def test_the_deadline_ends_a_wait_and_also_a_flood_of_events() -> None:
    async def silent(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        await forever()

    async def flood(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        while True:
            yield Tokens((token_at(0, call.request),))

    decoding = PlayedWorker("decode")
    async with played(decoding) as made:
        for script in (silent, flood):
            decoding.script = script
            before = asyncio.get_running_loop().time()
            with pytest.raises(Unavailable, match="deadline") as refusal:
                await made.generate(timeout_s=0.3)
            assert refusal.value.reason is Reason.NO_ROOM
            assert 0.3 <= asyncio.get_running_loop().time() - before < 3
        assert all(0 < call.request.timeout_s <= 0.3 for call in decoding.calls)


async def test_a_batch_may_hold_several_tokens_and_what_follows_the_end_is_not_the_clients() -> None:
    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        made = [token_at(index, call.request) for index in range(5)]
        yield Tokens((made[0], made[0], made[1]))
        yield Tokens(())
        yield Tokens((made[1], *made[2:], Token(5, 9), Token(6, 9)))
        await forever()

    async with played(PlayedWorker("decode", decode)) as made:
        assert_whole(await made.generate())


async def test_a_token_that_skips_one_is_an_error_and_the_request_is_built_again() -> None:
    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        yield Tokens((token_at(call.request.num_emitted_tokens, call.request),))
        yield Tokens((token_at(call.request.num_emitted_tokens + 2, call.request),))
        await forever()

    async with played(PlayedWorker("decode", decode)) as made:
        received: list[Token] = []
        with pytest.raises(Unavailable, match="came before") as failure:
            async for batch in made.stream(replace(GREEDY, max_tokens=9)):
                received += batch
        assert failure.value.reason is Reason.INTERNAL
        assert [token.index for token in received] == [0, 1, 2, 3], "one for each attempt"


async def test_a_second_started_opens_no_second_decode() -> None:
    async def prefill(call: PlayedCall) -> AsyncIterator[Event]:
        yield started(call)
        yield Started(replace(started(call).handoff, handoff_id="another"))
        yield first(call)
        await forever()

    decoding = PlayedWorker("decode")
    async with played(PlayedWorker("prefill", prefill), decoding) as made:
        assert_whole(await made.generate())
        assert len(decoding.calls) == 1
