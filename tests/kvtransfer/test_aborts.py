"""An abort at every frame, by either side or both: the memory is left alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.errors import AbortedError, PeerLostError, TransferError
from kvtransfer.frames import FrameType
from kvtransfer.messages import TransferDeadlines
from kvtransfer.transport import Pull
from tests.kvtransfer.makers import (
    Pair,
    Probe,
    contents,
    make_blocks,
    make_destination,
    make_pair,
    make_request,
    soon,
)

DEADLINES = TransferDeadlines(working_interval_s=0.05, release_s=0.1)
STAGES: dict[str, tuple[str, Callable[[], Probe]]] = {  # which side's thread stops there
    "open": ("decode", lambda: Probe(stop_sending=(FrameType.OPEN, 0))),
    "accept": ("prefill", lambda: Probe(stop_sending=(FrameType.ACCEPT, 0))),
    "send the first block": ("prefill", lambda: Probe(stop_sending=(FrameType.BLOCK, 0))),
    "send the last block": ("prefill", lambda: Probe(stop_sending=(FrameType.BLOCK, 4))),
    "write the first block": ("decode", lambda: Probe(stop_writing=0)),
    "write a middle block": ("decode", lambda: Probe(stop_writing=2)),
    "write the last block": ("decode", lambda: Probe(stop_writing=4)),
    "working": ("prefill", lambda: Probe(stop_sending=(FrameType.WORKING, 0))),
    "done": ("prefill", lambda: Probe(stop_sending=(FrameType.DONE, 0))),
    "ack": ("decode", lambda: Probe(stop_sending=(FrameType.ACK, 0))),
}
# How far prefill is then; elsewhere it has finished. (DONE in decode's buffer would survive prefill's abort.)
NUM_FINISHED = {"write": 5, "working": 2}


async def assert_released(pull: Pull) -> None:
    async def release() -> None:
        while not await pull.wait_released():  # `release_s` is shorter here than a busy machine needs
            pass

    await soon(release())


@pytest.mark.parametrize(
    ("stage", "aborting"),
    [
        (stage, side)
        for stage in STAGES
        for side in ("decode", "prefill", "both")
        if stage != "open" or side == "decode"
    ],
)
@pytest.mark.parametrize("kind", ["tcp", "inproc"])
async def test_after_an_abort_nobody_writes_to_the_destination(kind: str, stage: str, aborting: str) -> None:
    side, make_probe = STAGES[stage]
    probe, destination = make_probe(), make_destination(5)
    async with make_pair(kind, DEADLINES, **{side: probe}) as pair:
        pair.offers.offer(make_blocks(5), num_finished=NUM_FINISHED.get(stage.split()[0]))
        pull = pair.decode.pull(pair.address, make_request(), destination)
        assert await probe.reached.wait(20.0)
        if aborting != "prefill":
            pull.abort()
            pull.abort()
        for outgoing in pair.offers.all_opened if aborting != "decode" else []:
            outgoing.abort()
            outgoing.abort()
            assert side == "decode" or not await outgoing.wait_released(0.0)
        if stage.startswith("write"):
            assert not await pull.wait_released(), "a thread is about to write there"
        probe.go.set()
        expected = PeerLostError if aborting == "prefill" else AbortedError
        if (stage, aborting) == ("ack", "prefill"):
            await soon(pull.result(), 1.0)  # everything is there already
        else:
            with pytest.raises(expected):
                await soon(pull.result(), 1.0)
        await assert_released(pull)
        before = contents(destination)
        if stage != "open":
            causes: dict[str, set[type]] = {"decode": {PeerLostError}, "prefill": {AbortedError}}
            assert type(await pair.offers.next_error()) in causes.get(aborting, {PeerLostError, AbortedError})
        pull.abort()
    assert contents(destination) == before


@pytest.mark.parametrize("kind", ["tcp", "inproc"])
async def test_the_other_side_knows_of_an_abort_at_once_while_there_is_nothing_to_send(kind: str) -> None:
    deadlines = TransferDeadlines(working_interval_s=30.0, peer_timeout_s=30.0)
    async with make_pair(kind, deadlines) as pair:
        pair.offers.offer(make_blocks(2), num_finished=1)
        pull = pair.decode.pull(pair.address, make_request(), make_destination(2))
        await pair.offers.next_opened()
        pull.abort()
        _, error = await soon(pair.offers.closings.get(), 1.0)
        assert isinstance(error, PeerLostError)

        pull = pair.decode.pull(pair.address, make_request(), make_destination(2))
        (await pair.offers.next_opened()).abort()
        with pytest.raises(PeerLostError):
            await soon(pull.result(), 1.0)


@pytest.mark.parametrize("kind", ["tcp", "inproc"])
async def test_an_abort_after_the_end_does_not_cut_the_next_pull(kind: str) -> None:
    """Both use the same connection."""
    async with make_pair(kind) as pair:
        pair.offers.offer(make_blocks(2))
        pair.offers.offer(make_blocks(2), "next", num_finished=1)
        over = pair.decode.pull(pair.address, make_request(), make_destination(2))
        await soon(over.result())
        outgoing = await pair.offers.next_opened()
        assert await pair.offers.next_error() is None
        running = pair.decode.pull(pair.address, make_request("next"), make_destination(2))
        next_outgoing = await pair.offers.next_opened()
        over.abort()
        outgoing.abort()
        next_outgoing.finish(8, b"")
        await soon(running.result())
        await soon(over.result())
        assert await over.wait_released()


@pytest.mark.parametrize("kind", ["tcp", "inproc"])
async def test_an_abort_before_the_connection_is_made_releases_at_once(kind: str) -> None:
    async with make_pair(kind) as pair:
        pull = pair.decode.pull(pair.address, make_request(), make_destination(1))
        pull.abort()
        assert await pull.wait_released()
        with pytest.raises(AbortedError):
            await soon(pull.result())


EVENTS = st.sampled_from(
    ["publish", "finish", "fail", "abort pull", "abort outgoing", "wait a little", "close decode", "close prefill"]
)


@pytest.mark.parametrize("kind", ["tcp", "inproc"])
@settings(max_examples=40, deadline=None)
@given(events=st.lists(EVENTS, max_size=8), num_finished=st.sampled_from([None, 0, 3]))
def test_no_order_of_events_raises_or_leaks(kind: str, events: list[str], num_finished: int | None) -> None:
    asyncio.run(run_events(kind, events, num_finished))


async def run_events(kind: str, events: list[str], num_finished: int | None) -> None:
    destination = make_destination(4)
    async with make_pair(kind) as pair:
        pair.offers.offer(make_blocks(4), num_finished=num_finished)
        pull = pair.decode.pull(pair.address, make_request(), destination)
        for event in events:
            await apply(event, pair, pull)
        pull.abort()
        for outgoing in pair.offers.all_opened:
            outgoing.abort()
        with suppress(TransferError):
            await soon(pull.result(), 1.0)
        await assert_released(pull)
        before = contents(destination)
        while pair.offers.open_by_id:
            await pair.offers.next_error()
    assert contents(destination) == before


async def apply(event: str, pair: Pair, pull: Pull) -> None:
    opened = pair.offers.all_opened
    match event:
        case "publish":
            for outgoing in opened:
                outgoing.publish(outgoing.num_blocks, 30, 2)
        case "finish":
            for outgoing in opened:
                outgoing.finish(32, b"x")
        case "fail":
            for outgoing in opened:
                outgoing.fail("no reason")
        case "abort pull":
            pull.abort()
        case "abort outgoing":
            for outgoing in opened:
                outgoing.abort()
        case "wait a little":
            await asyncio.sleep(0.002)
        case "close decode":
            await pair.decode.close()
        case "close prefill":
            await pair.prefill.close()
