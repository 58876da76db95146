"""The dispatcher against played workers: the order of events, the ends of a request, its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pdserve_wire.errors import Reason, Refused, Unavailable
from pdserve_wire.messages import Accepted, First, PrefillTimings, Started, Token, Tokens
from tests.router.makers import until
from tests.router.played_workers import (
    GREEDY,
    KV_COMPLETE,
    PROMPT,
    Event,
    PlayedCall,
    PlayedWorker,
    assert_whole,
    failing_with,
    first,
    forever,
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
        answer = made.begin()
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


@pytest.mark.parametrize("is_asked_second", [False, True])
async def test_a_refusal_of_decode_reaches_the_client_before_any_token_and_prefill_is_released(
    is_asked_second: bool,
) -> None:
    """faults: decode refuses before its scheduler sees the request after prefill is done."""
    has_second = asyncio.Event()

    async def prefill(call: PlayedCall) -> AsyncIterator[Event]:
        yield started(call)
        await has_second.wait()
        yield first(call)
        await forever()

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        if is_asked_second and call.pull_attempt == 0:
            yield Accepted()
            raise Unavailable(Reason.KV_LOST, "peer closed")
        has_second.set()
        await until(lambda: made.timelines[0].prefill is not None)
        await asyncio.sleep(0.02)
        raise Refused("top_k: this worker knows better")

    prefilling = PlayedWorker("prefill", prefill)
    decoding = [PlayedWorker("decode", decode, f"d{number}") for number in range(2)]
    async with played(prefilling, *decoding) as made:
        received: list[Token] = []
        with pytest.raises(Refused, match="knows better"):
            async for batch in made.stream():
                received += batch
        assert not received and len(prefilling.calls) == 1
        assert sum(len(worker.calls) for worker in decoding) == 1 + is_asked_second
        await asyncio.wait_for(prefilling.calls[0].ended.wait(), 5)


async def test_a_refusal_of_prefill_reaches_the_client_and_is_not_tried_elsewhere() -> None:
    prefill = [PlayedWorker("prefill", failing_with(Reason.REFUSED, "too long"), f"p{number}") for number in range(2)]
    async with played(*prefill, PlayedWorker("decode")) as made:
        with pytest.raises(Refused, match="too long"):
            await made.generate()
        assert sum(len(worker.calls) for worker in prefill) == 1


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
async def test_a_deadline_in_the_past_opens_nothing(timeout_s: float) -> None:
    decoding = PlayedWorker("decode")
    async with played(decoding) as made:
        with pytest.raises(Unavailable) as refusal:
            await made.generate(timeout_s=timeout_s)
        assert refusal.value.reason is Reason.NO_ROOM
        assert not decoding.calls and made.timelines[0].admitted_at is None


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
