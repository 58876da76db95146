"""The engine's heartbeat with a scripted runner: aborts, failures and stops in the middle of a step, and wake-ups."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.block_pool import Holder
from engine.errors import EngineStopped, NoRoom, RequestRefused, SequenceFailed, StepFailed
from engine.loop import EngineLoop
from engine.output_stream import SampledToken, StepOutput
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from tests.engine.makers import TOKEN, assert_no_leaks, make_scheduler, make_sequence

T = TypeVar("T")


class ScriptedRunner:
    """Gives every sampled sequence the same token. A step can be held, and be made to fail."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)  # released when a held step has begun
        self.may_go = threading.Event()
        self.may_go.set()
        self.failures: list[Exception] = []  # one for each of the next steps
        self.num_steps = 0

    def run(self, batch: Batch) -> dict[Sequence, tuple[SampledToken, ...]]:
        self.num_steps += 1
        self.entered.release()
        assert self.may_go.wait(20)
        if self.failures:
            raise self.failures.pop(0)
        return {item.sequence: (SampledToken(TOKEN),) for item in batch.sampled}

    async def hold(self) -> None:
        """From the next step on."""
        self.may_go.clear()
        while self.entered.acquire(blocking=False):
            pass

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=20)


@asynccontextmanager
async def running(scheduler: Scheduler) -> AsyncIterator[tuple[EngineLoop, ScriptedRunner]]:
    runner = ScriptedRunner()
    loop = EngineLoop(scheduler, runner)
    loop.start()
    try:
        yield loop, runner
    finally:
        runner.may_go.set()
        await loop.stop()


async def soon(awaitable: Awaitable[T]) -> T:
    """For what must happen: the time is only how long a broken test hangs."""
    return await asyncio.wait_for(awaitable, 20)


async def read(sequence: Sequence) -> list[StepOutput]:
    """Everything up to the finish reason. Raises what ends the sequence otherwise."""
    outputs: list[StepOutput] = []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += await soon(sequence.output.get())
    return outputs


async def is_silent(sequence: Sequence) -> bool:
    """Nothing was put after the abort, an error neither."""
    try:
        await asyncio.wait_for(sequence.output.get(), 0.01)
    except TimeoutError:
        return True
    return False


async def stepped(loop: EngineLoop) -> None:
    await soon(loop.stepped.subscribe().wait())


async def test_a_sequence_streams_its_steps_in_order() -> None:
    async with running(make_scheduler(max_num_batched_tokens=4)) as (loop, _):
        sequence = make_sequence(10, max_tokens=3)
        loop.submit(sequence)
        outputs = await read(sequence)
        assert [len(output.tokens) for output in outputs] == [0, 0, 1, 1, 1]
        assert [output.num_computed_tokens for output in outputs] == [4, 8, 10, 11, 12]
        assert [output.step for output in outputs] == [1, 2, 3, 4, 5]
        assert outputs[0].started_at == sequence.output.started_at
        assert all(output.started_at <= output.ended_at for output in outputs)
        assert (loop.num_prompt_tokens, loop.num_generation_tokens) == (10, 3)
        assert_no_leaks(loop.scheduler)


async def test_an_abort_in_a_step_takes_effect_when_the_step_ends() -> None:
    async with running(make_scheduler()) as (loop, runner):
        await runner.hold()
        sequence, other = make_sequence(8), make_sequence(4, max_tokens=2)
        loop.submit(sequence)
        loop.submit(other)
        await runner.wait_entered()
        assert loop.step_age_s > 0.0
        loop.abort(sequence)
        assert loop.scheduler.pool.ledger()["step"] == 2
        runner.may_go.set()
        await read(other)
        assert_no_leaks(loop.scheduler)
        assert await is_silent(sequence)
        assert loop.step_age_s == 0.0


async def test_a_step_that_raises_fails_its_sequences_and_the_loop_lives() -> None:
    async with running(make_scheduler()) as (loop, runner):
        runner.failures = [ValueError("no such expert")]
        await runner.hold()
        failed, unwanted, later = (make_sequence(3, max_tokens=2) for _ in range(3))
        loop.submit(failed)
        loop.submit(unwanted)
        await runner.wait_entered()
        loop.submit(later)
        loop.abort(unwanted)
        ended = asyncio.create_task(stepped(loop))
        await asyncio.sleep(0)
        runner.may_go.set()
        with pytest.raises(StepFailed, match="the model failed in step 1: no such expert"):
            await read(failed)
        await ended
        assert (await read(later))[-1].finish_reason == "length"
        assert await is_silent(unwanted)
        assert not loop.has_died
        assert_no_leaks(loop.scheduler)


async def test_a_stop_waits_for_the_step_and_fails_whoever_is_left() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    async with running(scheduler) as (loop, runner):
        await runner.hold()
        in_step, waiting = make_sequence(3), make_sequence(3)
        loop.submit(in_step)
        loop.submit(waiting)
        await runner.wait_entered()
        stop = asyncio.create_task(loop.stop())
        await asyncio.sleep(0.01)
        assert not stop.done()
        assert scheduler.pool.num_free < scheduler.pool.num_blocks
        runner.may_go.set()
        await soon(stop)
        for sequence in (in_step, waiting):
            with pytest.raises(EngineStopped):
                await read(sequence)
        with pytest.raises(EngineStopped):
            loop.submit(make_sequence(3))
        with pytest.raises(EngineStopped):
            loop.submit_computed(make_sequence(3))
        assert_no_leaks(scheduler)
        assert not loop.has_died


async def test_a_step_that_raises_while_the_loop_stops_is_told_and_no_more() -> None:
    async with running(make_scheduler()) as (loop, runner):
        runner.failures = [ValueError("late")]
        await runner.hold()
        sequence = make_sequence(3)
        loop.submit(sequence)
        await runner.wait_entered()
        stop = asyncio.create_task(loop.stop())
        await asyncio.sleep(0)
        runner.may_go.set()
        await soon(stop)
        with pytest.raises(EngineStopped):
            await read(sequence)


async def test_a_loop_that_was_never_started_stops() -> None:
    await soon(EngineLoop(make_scheduler(), ScriptedRunner()).stop())


async def test_a_bug_in_the_scheduler_fails_everybody_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    async with running(scheduler) as (loop, _):

        def broken(*_: object) -> None:
            raise AssertionError("an invariant of ours")

        monkeypatch.setattr(scheduler, "complete", broken)
        sequences = [make_sequence(3), make_sequence(3)]
        for sequence in sequences:
            loop.submit(sequence)
        for sequence in sequences:
            with pytest.raises(SequenceFailed):
                await read(sequence)
        assert loop.has_died
        with pytest.raises(EngineStopped):
            loop.submit(make_sequence(3))


async def test_a_refusal_leaves_the_loop_as_it_was() -> None:
    async with running(make_scheduler(num_blocks=2, block_size=4)) as (loop, runner):
        with pytest.raises(RequestRefused):
            loop.submit(make_sequence(9))
        assert loop.scheduler.is_idle
        sequence = make_sequence(4, max_tokens=4)
        loop.submit(sequence)
        await read(sequence)
        assert runner.num_steps == 4


async def test_whoever_can_not_be_held_any_more_is_told() -> None:
    async with running(make_scheduler(num_blocks=3, block_size=4)) as (loop, _):
        pool = loop.scheduler.pool
        blocks = pool.allocate(1, Holder.WRITING) or []
        hopeless, behind = make_sequence(9, max_tokens=1), make_sequence(3, max_tokens=1)
        loop.submit(hopeless)
        loop.submit(behind)
        await asyncio.sleep(0.01)
        pool.move(blocks, Holder.WRITING, Holder.QUARANTINED)
        with pytest.raises(NoRoom):
            await read(hopeless)
        await read(behind)


async def test_room_that_comes_back_without_a_free_block_wakes_the_loop() -> None:
    """A hand-off's lease ends while a pull still reads its blocks: the half that hand-offs may hold is open again."""
    async with running(make_scheduler(num_blocks=6, block_size=4)) as (loop, _):
        pool = loop.scheduler.pool
        blocks = pool.allocate(4, Holder.OFFERED) or []
        pool.hold(blocks, Holder.PULLED)
        sequence = make_sequence(3, ends_after_first_token=True)
        loop.submit(sequence)
        await asyncio.sleep(0.01)
        assert not sequence.output.started.is_set()
        pool.release(blocks, Holder.OFFERED)
        assert (await soon(sequence.output.get()))[0].tokens


@settings(max_examples=60, deadline=None)
@given(
    script=st.lists(
        st.tuples(st.sampled_from(("submit", "abort", "fail", "take", "give")), st.integers(0, 3)), max_size=25
    ),
    num_blocks=st.integers(3, 6),
)
def test_no_wake_up_is_lost(script: list[tuple[str, int]], num_blocks: int) -> None:
    """Whatever comes at whatever moment: everybody ends, and the loop then sleeps with all blocks free."""

    async def play() -> None:
        async with running(make_scheduler(num_blocks=num_blocks, block_size=2, max_num_seqs=2)) as (loop, runner):
            pool, taken = loop.scheduler.pool, list[int]()
            readers: dict[Sequence, asyncio.Task[list[StepOutput]]] = {}
            for action, number in script:
                if action == "submit":
                    sequence = make_sequence(1 + number, max_tokens=2)
                    loop.submit(sequence)
                    readers[sequence] = asyncio.create_task(read(sequence))
                elif action == "abort" and readers:
                    sequence = list(readers)[number % len(readers)]
                    loop.abort(sequence)
                    readers.pop(sequence).cancel()
                elif action == "fail":
                    runner.failures.append(ValueError("scripted"))
                elif action == "take":
                    taken += pool.allocate(min(number, pool.num_free), Holder.WRITING) or []
                elif action == "give":
                    pool.release(taken, Holder.WRITING)
                    taken.clear()
                for _ in range(number):
                    await asyncio.sleep(0)
            pool.release(taken, Holder.WRITING)
            ends = await soon(asyncio.gather(*readers.values(), return_exceptions=True))
            for end in ends:
                assert isinstance(end, (list, StepFailed)), end
            await soon(_idle(loop))
            assert_no_leaks(loop.scheduler)

    asyncio.run(play())


async def _idle(loop: EngineLoop) -> None:
    event = loop.stepped.subscribe()
    while loop.step_age_s or not loop.scheduler.is_idle:
        event.clear()
        await event.wait()
