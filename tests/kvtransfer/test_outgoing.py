"""What prefill may say about one pull, and what its sender is told."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtransfer.errors import AbortedError
from kvtransfer.messages import MAX_PAYLOAD_NBYTES
from kvtransfer.outgoing import Outgoing, as_blocks
from tests.kvtransfer.makers import make_blocks


class RecordingSender:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def wake(self) -> None:
        self.calls.append("wake")

    def force_close(self) -> None:
        self.calls.append("close")


def make_attached(num_blocks: int = 4) -> tuple[Outgoing, RecordingSender]:
    outgoing, sender = Outgoing(make_blocks(num_blocks)), RecordingSender()
    outgoing.attach(sender)
    return outgoing, sender


def test_a_step_with_new_blocks_wakes_the_sender_and_one_without_does_not() -> None:
    outgoing, sender = make_attached()
    outgoing.publish(2, 32, 1)
    outgoing.publish(2, 40, 2)
    assert sender.calls == ["wake"]
    progress = outgoing.progress()
    assert (progress.num_finished_blocks, progress.num_computed_tokens, progress.step) == (2, 40, 2)


def test_finishing_makes_every_block_ready() -> None:
    outgoing, sender = make_attached()
    outgoing.publish(1, 16, 5)
    outgoing.finish(60, b"token")
    progress = outgoing.progress()
    assert (progress.num_finished_blocks, progress.step) == (4, 5)
    assert progress.finish is not None
    assert (progress.finish.num_tokens, progress.finish.payload) == (60, b"token")
    assert sender.calls == ["wake", "wake"]


@pytest.mark.parametrize("num_finished", [-1, 1, 5])
def test_blocks_never_become_unfinished_nor_more_than_there_are(num_finished: int) -> None:
    outgoing, _ = make_attached()
    outgoing.publish(2, 32, 1)
    with pytest.raises(ValueError, match="finished blocks"):
        outgoing.publish(num_finished, 40, 2)


def test_a_payload_is_bounded() -> None:
    with pytest.raises(ValueError, match="payload"):
        Outgoing([]).finish(1, bytes(MAX_PAYLOAD_NBYTES + 1))


@pytest.mark.parametrize("end", ["finish", "fail", "abort", "mark_released"])
def test_what_comes_after_the_end_is_ignored(end: str) -> None:
    outgoing, _ = make_attached()
    arguments = {"finish": (1, b""), "fail": ("reason",), "abort": (), "mark_released": ()}
    getattr(outgoing, end)(*arguments[end])
    progress = outgoing.progress()
    outgoing.publish(0, 0, 9)
    outgoing.fail("later")
    outgoing.finish(2, b"later")
    assert outgoing.progress() == progress


def test_an_abort_counts_also_after_the_finish_and_closes_once() -> None:
    outgoing, sender = make_attached()
    outgoing.finish(1, b"")
    outgoing.abort()
    outgoing.abort()
    assert outgoing.progress().is_aborted
    assert sender.calls == ["wake", "close", "wake"]


def test_nothing_is_sent_that_was_aborted_first() -> None:
    outgoing = Outgoing(make_blocks(1))
    outgoing.abort()
    with pytest.raises(AbortedError):
        outgoing.attach(RecordingSender())


def test_a_released_outgoing_holds_no_memory_and_calls_nobody() -> None:
    outgoing, sender = make_attached()
    outgoing.mark_released()
    outgoing.mark_released()
    outgoing.abort()
    assert outgoing.blocks == ()
    assert sender.calls == []


async def test_its_release_is_awaited_from_the_loop() -> None:
    outgoing, _ = make_attached()
    assert not await outgoing.wait_released(0.0)
    waiting = [asyncio.ensure_future(outgoing.wait_released(20.0)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    thread = threading.Thread(target=outgoing.mark_released)
    thread.start()
    assert await waiting[1] and await waiting[2]
    assert await outgoing.wait_released(0.0)
    thread.join()


@pytest.mark.parametrize(
    "blocks",
    [
        [memoryview(bytearray(4)), memoryview(bytearray(5))],
        [memoryview(bytearray(8))[::2]],
        [memoryview(b"")],
    ],
)
def test_blocks_are_contiguous_and_of_one_size(blocks: list[memoryview]) -> None:
    with pytest.raises(ValueError, match="block"):
        Outgoing(blocks)


def test_a_destination_must_be_writable_and_keeps_its_memory() -> None:
    buffer = bytearray(8)
    block = memoryview(buffer).cast("i", [1, 2])
    (view,) = as_blocks([block], must_be_writable=True)
    view[0] = 7
    assert (view.format, view.shape, buffer[0]) == ("B", (8,), 7)
    with pytest.raises(ValueError, match="writable"):
        as_blocks([memoryview(bytes(8))], must_be_writable=True)
