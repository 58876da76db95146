"""Broken peers and wires, by `FaultyTransport` over every transport: each wait ends, each lie is found."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvtransfer.errors import ChecksumError, PeerLostError, PeerSilentError, TransferError
from kvtransfer.faulty import FaultPlan, FaultyTransport
from kvtransfer.frames import FrameType
from kvtransfer.messages import TransferDeadlines
from tests.kvtransfer.makers import (
    IMPATIENT,
    contents,
    make_blocks,
    make_destination,
    make_pair,
    make_request,
    soon,
    until,
)

pytestmark = pytest.mark.parametrize("kind", ["tcp", "inproc"])

SLACK_S = 1.5  # of a busy machine


async def test_one_flipped_byte_among_fifty_transfers_is_found_and_only_there(kind: str) -> None:
    num_pulls, destinations = 50, [make_destination(4) for _ in range(50)]
    async with make_pair(kind, decode=FaultPlan(flip_block=2)) as pair:
        for n in range(num_pulls):
            pair.offers.offer(make_blocks(4, seed=n), f"h{n}")
        pulls = [pair.decode.pull(pair.address, make_request(f"h{n}"), destinations[n]) for n in range(num_pulls)]
        outcomes = await soon(asyncio.gather(*(pull.result() for pull in pulls), return_exceptions=True))
    broken = [n for n in range(num_pulls) if isinstance(outcomes[n], BaseException)]
    assert [type(outcomes[n]) for n in broken] == [ChecksumError]
    for n in range(num_pulls):
        is_right = contents(destinations[n]) == contents(make_blocks(4, seed=n))
        assert is_right == (n not in broken)


async def test_prefill_hears_of_a_flipped_byte_as_a_closed_connection(kind: str) -> None:
    async with make_pair(kind, decode=FaultPlan(flip_block=0)) as pair:
        pair.offers.offer(make_blocks(2), num_finished=1)
        with pytest.raises(ChecksumError):
            await soon(pair.decode.pull(pair.address, make_request(), make_destination(2)).result())
        _, error = await soon(pair.offers.closings.get(), 1.0)
        assert isinstance(error, PeerLostError)


@pytest.mark.parametrize("frame", [FrameType.ACCEPT, FrameType.BLOCK, FrameType.WORKING, FrameType.DONE])
async def test_prefill_that_raises_on_send_is_known_at_once(kind: str, frame: FrameType) -> None:
    deadlines = TransferDeadlines(working_interval_s=0.05)
    async with make_pair(kind, deadlines, prefill=FaultPlan(raise_on=frame)) as pair:
        pair.offers.offer(make_blocks(2), num_finished=1 if frame is FrameType.WORKING else None)
        with pytest.raises(PeerLostError):
            await soon(pair.decode.pull(pair.address, make_request(), make_destination(2)).result(), 1.0)
        assert isinstance(await pair.offers.next_error(), PeerLostError)


async def test_decode_that_raises_on_open_fails_at_once(kind: str) -> None:
    async with make_pair(kind, decode=FaultPlan(raise_on=FrameType.OPEN)) as pair:
        with pytest.raises(PeerLostError):
            await soon(pair.decode.pull(pair.address, make_request(), make_destination(2)).result(), 1.0)


async def test_a_lost_ack_costs_decode_nothing_and_prefill_one_closed_connection(kind: str) -> None:
    async with make_pair(kind, decode=FaultPlan(raise_on=FrameType.ACK)) as pair:
        pair.offers.offer(make_blocks(2))
        await soon(pair.decode.pull(pair.address, make_request(), make_destination(2)).result(), 1.0)
        _, error = await soon(pair.offers.closings.get(), 1.0)
        assert isinstance(error, PeerLostError)


@pytest.mark.parametrize(
    ("frame", "timeout_s"),
    [
        (FrameType.ACCEPT, IMPATIENT.open_s),
        (FrameType.BLOCK, IMPATIENT.peer_timeout_s),
        (FrameType.DONE, IMPATIENT.peer_timeout_s),
    ],
)
async def test_prefill_that_goes_silent_is_given_up(kind: str, frame: FrameType, timeout_s: float) -> None:
    async with make_pair(kind, IMPATIENT, prefill=FaultPlan(hold_on=frame)) as pair:
        pair.offers.offer(make_blocks(2))
        started = time.monotonic()
        pull = pair.decode.pull(pair.address, make_request(), make_destination(2))
        with pytest.raises(PeerSilentError):
            await soon(pull.result())
        assert timeout_s <= time.monotonic() - started < timeout_s + SLACK_S
        assert await pull.wait_released()


@pytest.mark.parametrize("frame", [FrameType.ACCEPT, FrameType.BLOCK, FrameType.DONE])
async def test_a_lost_frame_is_silence_to_both(kind: str, frame: FrameType) -> None:
    """Each waits for the other; a swallowed BLOCK is noticed by its successor's index."""
    async with make_pair(kind, IMPATIENT, prefill=FaultPlan(swallow=frozenset({frame}))) as pair:
        pair.offers.offer(make_blocks(2))
        with pytest.raises(TransferError):
            await soon(pair.decode.pull(pair.address, make_request(), make_destination(2)).result())
        assert isinstance(await pair.offers.next_error(), TransferError)


async def test_prefill_that_works_without_a_word_is_given_up(kind: str) -> None:
    async with make_pair(kind, IMPATIENT, prefill=FaultPlan(swallow=frozenset({FrameType.WORKING}))) as pair:
        pair.offers.offer(make_blocks(2), num_finished=1)
        with pytest.raises(PeerSilentError):
            await soon(pair.decode.pull(pair.address, make_request(), make_destination(2)).result())


async def test_decode_that_says_nothing_is_given_up(kind: str) -> None:
    async with make_pair(kind, IMPATIENT, decode=FaultPlan(swallow=frozenset({FrameType.ACK}))) as pair:
        pair.offers.offer(make_blocks(2))
        started = time.monotonic()
        await soon(pair.decode.pull(pair.address, make_request(), make_destination(2)).result())
        assert isinstance(await pair.offers.next_error(), PeerSilentError)
        assert time.monotonic() - started < IMPATIENT.peer_timeout_s + SLACK_S


async def test_a_connection_that_never_opens_is_closed(kind: str) -> None:
    async with make_pair(kind, IMPATIENT, decode=FaultPlan(swallow=frozenset({FrameType.OPEN}))) as pair:
        pull = pair.decode.pull(pair.address, make_request(), make_destination(2))
        with pytest.raises((PeerLostError, PeerSilentError)):
            await soon(pull.result(), IMPATIENT.open_s + SLACK_S)


async def test_a_delayed_write_is_over_before_the_memory_is_called_free(kind: str) -> None:
    destination = make_destination(3)
    plan = FaultPlan(delay_s=0.4, delay_block=1)
    async with make_pair(kind, TransferDeadlines(release_s=0.05), decode=plan) as pair:
        pair.offers.offer(make_blocks(3))
        pull = pair.decode.pull(pair.address, make_request(), destination)
        await pair.offers.next_opened()
        first = contents(make_blocks(3))[0]
        await until(lambda: bytes(destination[0]) == first)  # the thread is at the delay, or short of it
        pull.abort()
        assert not await pull.wait_released(), "the write is still to come"
        while not await pull.wait_released():
            pass
        for block in destination:
            block[:] = b"\xaa" * block.nbytes  # the next request's
        assert isinstance(await pair.offers.next_error(), PeerLostError)
    assert contents(destination) == [b"\xaa" * block.nbytes for block in destination]


async def test_a_refused_release_is_a_false(kind: str) -> None:
    async with make_pair(kind, decode=FaultPlan(is_release_refused=True)) as pair:
        pair.offers.offer(make_blocks(1))
        pull = pair.decode.pull(pair.address, make_request(), make_destination(1))
        await soon(pull.result())
        pull.abort()
        assert not await pull.wait_released()


async def test_a_held_sender_keeps_its_memory_until_it_is_let_go(kind: str) -> None:
    async with make_pair(kind, IMPATIENT, prefill=FaultPlan(hold_on=FrameType.DONE)) as pair:
        pair.offers.offer(make_blocks(2))
        pull = pair.decode.pull(pair.address, make_request(), make_destination(2))
        outgoing = await pair.offers.next_opened()
        with pytest.raises(PeerSilentError):
            await soon(pull.result())
        outgoing.abort()
        assert not await outgoing.wait_released(0.1)
        assert isinstance(pair.prefill, FaultyTransport)
        pair.prefill.let_go()
        assert await outgoing.wait_released(20.0)
