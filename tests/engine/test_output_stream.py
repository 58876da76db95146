"""A sequence's owner reads each step once and in order, and what ended it last."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import StepFailed
from engine.output_stream import OutputStream, SampledToken, StepOutput


def _output(step: int) -> StepOutput:
    return StepOutput((SampledToken(step),), step, step, 0.0, 0.0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3)))
def test_an_output_stream_gives_each_item_once_in_order_and_the_error_last(pauses: list[int]) -> None:
    async def play() -> None:
        stream = OutputStream()

        async def write() -> None:
            for step, pause in enumerate(pauses):
                stream.put(_output(step))
                for _ in range(pause):
                    await asyncio.sleep(0)
            stream.fail(StepFailed("over"))

        writer = asyncio.create_task(write())
        steps: list[int] = []
        with pytest.raises(StepFailed, match="over"):
            while True:
                items = await asyncio.wait_for(stream.get(), 20)
                assert items
                steps += [item.step for item in items]
        await writer
        assert steps == list(range(len(pauses)))
        with pytest.raises(StepFailed):
            await stream.get()

    asyncio.run(play())
