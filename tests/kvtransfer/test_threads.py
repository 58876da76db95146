"""The latch between threads and loops, and the group of threads that can be ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtransfer.threads import Latch, ThreadGroup


async def test_a_latch_that_is_not_set_in_time_is_a_false() -> None:
    latch = Latch()
    assert not await latch.wait(0.01)
    latch.set()
    latch.set()
    assert await latch.wait(0.0)


async def test_a_latch_is_set_from_another_thread() -> None:
    latch = Latch()
    thread = threading.Thread(target=latch.set)
    waiting = asyncio.ensure_future(latch.wait(20.0))
    await asyncio.sleep(0)
    thread.start()
    assert await waiting
    thread.join()


def test_a_waiter_whose_loop_is_gone_is_no_hindrance() -> None:
    latch = Latch()
    loop = asyncio.new_event_loop()
    task = loop.create_task(latch.wait(None))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    latch.set()
    assert latch.is_set
    task._log_destroy_pending = False  # type: ignore[attr-defined] # it is lost on purpose
    task.get_coro().close()


async def test_a_group_waits_for_its_threads_and_then_starts_no_more() -> None:
    group, go = ThreadGroup(), threading.Event()

    def go_on() -> None:
        assert go.wait(20.0)

    for _ in range(3):
        group.start("test", go_on)
    assert sum(thread.name == "kvtransfer-test" for thread in threading.enumerate()) == 3
    group.close()
    assert not await group.join(0.05)
    go.set()
    assert await group.join(20.0)
    with pytest.raises(RuntimeError, match="closed"):
        group.start("test", go.set)
