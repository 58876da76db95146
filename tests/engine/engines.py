"""Engines with real models in tests: sequences that arrive while others run, and all that they were given."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.block_pool import Holder
from engine.engine import Engine
from engine.output_stream import SampledToken
from engine.sampling import SamplingParams
from engine.sequence import Sequence as EngineSequence
from tests.engine.makers import assert_no_leaks


@dataclass(frozen=True, slots=True)
class Request:
    """Arrives when `after_steps` steps have been run since the first."""

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    after_steps: int = 0


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    """The loop runs; when left without an error, every block is free and nobody is there."""
    engine.loop.start()
    try:
        yield engine
        assert_no_leaks(engine.scheduler)
    finally:
        await engine.loop.stop()


async def generate(engine: Engine, requests: Sequence[Request]) -> list[list[SampledToken]]:
    """All tokens of each request, in the order of the requests."""
    stepped = engine.loop.stepped.subscribe()
    tasks: dict[int, asyncio.Task[list[SampledToken]]] = {}
    first_step = engine.scheduler.step
    for place, request in sorted(enumerate(requests), key=lambda one: one[1].after_steps):
        while engine.scheduler.step - first_step < request.after_steps and not engine.scheduler.is_idle:
            stepped.clear()
            await stepped.wait()
        sequence = EngineSequence(
            f"request-{place}", list(request.prompt_ids), len(request.prompt_ids), request.sampling
        )
        engine.loop.submit(sequence)
        tasks[place] = asyncio.create_task(_read(sequence))
    return [await tasks[place] for place in range(len(requests))]


def shuffle_free_blocks(engine: Engine, seed: int = 0) -> None:
    """So that no block table counts up."""
    blocks = engine.pool.allocate(engine.pool.num_free, Holder.SEQUENCE) or []
    random.Random(seed).shuffle(blocks)
    engine.pool.release(blocks, Holder.SEQUENCE)


async def _read(sequence: EngineSequence) -> list[SampledToken]:
    tokens: list[SampledToken] = []
    while True:
        for output in await sequence.output.get():
            tokens += output.tokens
            if output.finish_reason is not None:
                return tokens
