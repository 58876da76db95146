"""What decode loses is rebuilt: its workers die, fail and break off, and the stream goes on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.sampling import SamplingParams
from pdserve_wire.errors import Reason, Unavailable
from pdserve_wire.messages import Accepted
from router.dispatcher import DispatchOptions
from tests.router.makers import until
from tests.router.played_workers import (
    KV_COMPLETE,
    PROMPT,
    Event,
    PlayedCall,
    PlayedWorker,
    Script,
    assert_whole,
    failing_with,
    honest_decode,
    played,
    silent,
    tokens,
)

SEEDED = SamplingParams(max_tokens=5, temperature=0.8, seed=77)


def after(num_tokens: int, end: Script) -> Script:
    """A decode worker that has the KV, sends some tokens and goes on as `end`."""

    async def script(call: PlayedCall) -> AsyncIterator[Event]:
        yield Accepted()
        yield KV_COMPLETE
        begin = call.request.num_emitted_tokens
        for event in tokens(call, begin, begin + num_tokens):
            yield event
        async for event in end(call):
            yield event

    return script


async def ending(call: PlayedCall) -> AsyncIterator[Event]:
    """The worker ends the call as if all were well."""
    return
    yield


@pytest.mark.parametrize("how", ["dies", "fails", "ends early"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3])
async def test_a_stream_goes_on_elsewhere_from_the_token_where_its_decode_worker_was_lost(
    num_tokens: int, how: str
) -> None:
    """faults: a decode worker is killed at token k of a seeded, sampled stream."""
    end = {
        "dies": silent,
        "fails": failing_with(Reason.INTERNAL, "the engine broke"),
        "ends early": ending,
    }
    prefill, losing = PlayedWorker("prefill"), PlayedWorker("decode", after(num_tokens, end[how]), "losing")
    async with played(prefill, losing) as made:
        other = PlayedWorker("decode", honest_decode, "other")
        other.load = replace(other.load, num_running=9)
        await made.join(other)
        answer = made.begin(SEEDED)
        await until(lambda: made.timelines[0].num_output_tokens >= num_tokens)
        if how == "dies":
            await losing.die()
        assert_whole(await answer)
        again = other.calls[0].request
        assert again == prefill.calls[1].request
        assert again.token_ids == (*PROMPT, *range(1000, 1000 + num_tokens))
        assert (again.num_prompt_tokens, again.num_emitted_tokens, again.generation) == (3, num_tokens, 1)
        assert again.sampling == SEEDED == losing.calls[0].request.sampling
        assert len(made.timelines[0].resume_reasons) == 1


async def test_a_decode_worker_lost_before_it_has_the_kv_is_replaced_on_the_same_hand_off() -> None:
    prefill, losing = PlayedWorker("prefill"), PlayedWorker("decode", silent, "losing")
    async with played(prefill, losing) as made:
        answer = made.begin()
        await until(lambda: bool(losing.calls))
        other = PlayedWorker("decode", None, "other")
        await made.join(other)
        await losing.die()
        assert_whole(await answer)
        assert len(prefill.calls) == 1 and other.calls[0].pull_attempt == 1
        assert not made.timelines[0].resume_reasons


async def test_the_last_decode_worker_that_is_lost_takes_the_stream_with_it_at_once() -> None:
    losing = PlayedWorker("decode", after(2, silent))
    async with played(PlayedWorker("prefill"), losing) as made:
        answer = made.begin()
        await until(lambda: made.timelines[0].num_output_tokens == 2)
        await losing.die()
        with pytest.raises(Unavailable, match="no decode worker") as failure:
            await asyncio.wait_for(answer, 1)
        assert failure.value.reason is Reason.NO_WORKER


async def test_a_stream_that_has_begun_waits_for_a_busy_worker_a_little() -> None:
    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        if len(other.calls) < 3:
            raise Unavailable(Reason.BUSY, "full here")
        async for event in honest_decode(call):
            yield event

    losing, other = PlayedWorker("decode", after(2, ending), "losing"), PlayedWorker("decode", decode, "other")
    other.load = replace(other.load, num_running=9)
    async with played(losing, other) as made:
        assert_whole(await made.generate())
        assert made.timelines[0].resume_reasons == [Reason.LOST_PEER, Reason.BUSY, Reason.BUSY]


async def test_attempts_are_bounded_with_pauses_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    asked_at: list[float] = []

    async def decode(call: PlayedCall) -> AsyncIterator[Event]:
        asked_at.append(loop.time())
        raise Unavailable(Reason.INTERNAL, "the engine broke")
        yield

    decoding = PlayedWorker("decode", decode)
    async with played(decoding, options=DispatchOptions(max_attempts=4)) as made:
        with pytest.raises(Unavailable, match="engine broke"):
            await made.generate()
        assert [call.request.generation for call in decoding.calls] == [0, 1, 2, 3]
        pauses = [after - before for before, after in pairwise(asked_at)]
        assert pauses[1] >= 0.1 and pauses[2] >= 0.2
        monkeypatch.setattr("router.dispatcher._FIRST_BACKOFF_S", 5.0)
        before = loop.time()
        with pytest.raises(Unavailable) as failure:
            await made.generate(timeout_s=0.3)
        assert failure.value.reason is Reason.NO_ROOM and loop.time() - before < 3, "no pause outlasts the deadline"


async def test_a_worker_whose_call_broke_is_not_asked_until_it_beats_again() -> None:
    decoding = PlayedWorker("decode", failing_with(Reason.LOST_PEER, "broken"))
    async with played(decoding) as made:
        (worker,) = made.fleet.workers
        for _ in range(2):
            with pytest.raises(Unavailable, match="no decode worker is ready"):
                await made.generate()
        assert len(decoding.calls) == 1 and not worker.is_ready
        decoding.script = honest_decode
        decoding.reporter.report_now()
        await until(lambda: worker.is_ready)
        assert_whole(await made.generate())


@pytest.mark.parametrize("is_frozen", [True, False])
async def test_a_process_that_takes_the_id_of_another_takes_its_requests_too(is_frozen: bool) -> None:
    former = PlayedWorker("decode", after(2, silent), "same")
    async with played(PlayedWorker("prefill"), former) as made:
        answer = made.begin()
        await until(lambda: made.timelines[0].num_output_tokens == 2)
        latter = PlayedWorker("decode", honest_decode, "same")
        await made.join(latter)
        assert [worker.hello.epoch for worker in made.fleet.ready("decode")] == [latter.hello.epoch]
        if is_frozen:  # its calls stay open, and only its silence tells
            await former.stop_reporting()
        else:
            await former.die()
        assert_whole(await answer)
        assert made.timelines[0].resume_reasons == [Reason.LOST_PEER]
        assert latter.calls[0].request.num_emitted_tokens == 2
