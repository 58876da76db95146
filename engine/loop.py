"""The engine's heartbeat: schedule, run, complete.

Only `run` is on the engine thread. Everything else, and all control state, is on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from engine.batch import Batch
from engine.errors import EngineStopped, NoRoom, SequenceFailed, StepFailed
from engine.output_stream import SampledToken, StepOutput
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.signal import Signal

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes a batch. Called on the engine thread, one batch at a time."""

    def run(self, batch: Batch) -> dict[Sequence, tuple[SampledToken, ...]]:
        """Write the batch's KV and return the tokens, at least one, of each of its sampled sequences."""
        ...


class EngineLoop:
    """Runs steps while there is work, and waits on an event while there is none.

    Every sequence that was taken ends: in a finish reason, or in a `SequenceFailed` from its output.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.last_step_s = 0.0
        self.stepped = Signal()  # notified after each step
        self._runner = runner
        self._wake = scheduler.pool.freed.subscribe()
        self._step_started_at: float | None = None
        self._is_over = False
        self._task: asyncio.Task[None] | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    @property
    def step_age_s(self) -> float:
        """How long the running step has been running; 0 while idle."""
        return time.monotonic() - self._step_started_at if self._step_started_at is not None else 0.0

    @property
    def has_died(self) -> bool:
        """A bug of ours ended the loop: every sequence has failed, and only a new process helps."""
        return self._task is not None and self._task.done() and not self._task.cancelled()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine-loop")

    async def stop(self) -> None:
        """Wait for the running step, then end. Sequences that are still there fail: `EngineStopped`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._end()
        await asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; read its `output`. Raises `RequestRefused`, `EngineStopped`."""
        self._refuse_if_over()
        self.scheduler.add(sequence)
        self._wake.set()

    def submit_computed(self, sequence: Sequence) -> None:
        """Run a sequence whose KV arrived by transfer, all but its last token's. Raises `EngineStopped`."""
        self._refuse_if_over()
        self.scheduler.add_running(sequence)
        self._wake.set()

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence. Its blocks are back when the running step ends."""
        self.scheduler.abort(sequence)
        self._wake.set()

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                for sequence in self.scheduler.take_hopeless():
                    sequence.output.fail(
                        NoRoom("too many KV blocks of this worker are quarantined to hold this sequence")
                    )
                batch = self.scheduler.schedule()
                if batch is None:
                    await self._wake.wait()
                else:
                    await self._step(batch)
        except Exception:
            logger.exception("the engine loop has died")
        finally:
            self._end()

    async def _step(self, batch: Batch) -> None:
        started_at = self._step_started_at = time.monotonic()
        for item in batch.items:
            item.sequence.output.start(started_at)
        step = asyncio.get_running_loop().run_in_executor(self._executor, self._runner.run, batch)
        try:
            # not cancelled with this task: the engine thread is still in it
            await asyncio.wait([step])
        except asyncio.CancelledError:
            await asyncio.wait([step])
            self._fail(batch, EngineStopped, "the engine was stopped", step.exception())
            raise
        finally:
            self._step_started_at = None
        error = step.exception()
        if error is None:
            self._complete(batch, step.result(), started_at)
        else:
            self._fail(batch, StepFailed, f"the model failed in step {batch.step}: {error}", error)
        self.stepped.notify()

    def _complete(self, batch: Batch, sampled: dict[Sequence, tuple[SampledToken, ...]], started_at: float) -> None:
        ended_at = time.monotonic()
        self.last_step_s = ended_at - started_at
        self.num_prompt_tokens += sum(item.num_new_tokens for item in batch.items if item.is_prompt)
        for done in self.scheduler.complete(batch, sampled):
            self.num_generation_tokens += len(done.tokens)
            done.sequence.output.put(
                StepOutput(
                    tokens=done.tokens,
                    num_computed_tokens=done.sequence.num_computed_tokens,
                    step=batch.step,
                    started_at=started_at,
                    ended_at=ended_at,
                    finish_reason=done.finish_reason,
                )
            )

    def _fail(self, batch: Batch, kind: type[SequenceFailed], text: str, cause: BaseException | None) -> None:
        if cause is not None:
            logger.error("step %d failed", batch.step, exc_info=cause)
        for sequence in self.scheduler.fail(batch):
            sequence.output.fail(kind(text))

    def _end(self) -> None:
        self._is_over = True
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.abort(sequence)
            sequence.output.fail(EngineStopped("the engine was stopped"))

    def _refuse_if_over(self) -> None:
        if self._is_over:
            raise EngineStopped("the engine was stopped")
