"""The conformance suite of the seam, continued: peers that are slow, stuck, gone or back, and the end."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvtransfer.errors import AbortedError, PeerLostError, PeerSilentError, RefusedError, TransferError
from kvtransfer.frames import FrameType
from kvtransfer.messages import TransferDeadlines
from kvtransfer.outgoing import Outgoing
from tests.kvtransfer.makers import (
    IMPATIENT,
    KINDS,
    Offers,
    Pair,
    Probe,
    contents,
    host_of,
    make_blocks,
    make_destination,
    make_pair,
    make_request,
    make_transport,
    soon,
    transfer_threads,
    until,
)

pytestmark = pytest.mark.parametrize("kind", KINDS)


async def test_a_higher_attempt_takes_the_pull_over(kind: str) -> None:
    blocks, first, second = make_blocks(4), make_destination(4), make_destination(4)
    async with make_pair(kind) as pair:
        pair.offers.offer(blocks, num_finished=2)
        lower = pair.decode.pull(pair.address, make_request(pull_attempt=1), first)
        await pair.offers.next_opened()
        higher = pair.decode.pull(pair.address, make_request(pull_attempt=2), second)
        outgoing = await pair.offers.next_opened()
        with pytest.raises(PeerLostError):
            await soon(lower.result(), 1.0)
        with pytest.raises(RefusedError, match="superseded"):
            await soon(pair.decode.pull(pair.address, make_request(pull_attempt=1), first).result())
        outgoing.finish(9, b"")
        await soon(higher.result())
    assert contents(second) == contents(blocks)


async def test_working_keeps_a_slow_prefill_alive(kind: str) -> None:
    """Prefill's steps go on without a block for more than twice `peer_timeout_s`."""
    loop = asyncio.get_running_loop()
    enough, deadlines = asyncio.Event(), TransferDeadlines(peer_timeout_s=0.6, working_interval_s=0.1, stuck_step_s=0.4)
    num_working = 0

    def on_sending(frame: FrameType, _index: int) -> None:
        if frame is FrameType.WORKING:
            loop.call_soon_threadsafe(next_step)

    def next_step() -> None:
        nonlocal num_working
        num_working += 1
        outgoing.publish(1, 10, 1 + num_working)
        if num_working == 13:
            enough.set()

    async with make_pair(kind, deadlines, prefill=Probe(on_sending=on_sending)) as pair:
        pair.offers.offer(make_blocks(2), num_finished=1)
        pull = pair.decode.pull(pair.address, make_request(), make_destination(2))
        outgoing = await pair.offers.next_opened()
        await soon(enough.wait())
        outgoing.finish(9, b"")
        result = await soon(pull.result())
    assert result.transfer_s > 1.2


async def test_a_step_that_stands_still_is_silence(kind: str) -> None:
    deadlines = TransferDeadlines(working_interval_s=0.05, stuck_step_s=0.3)
    async with make_pair(kind, deadlines) as pair:
        pair.offers.offer(make_blocks(2), num_finished=1)
        started = time.monotonic()
        with pytest.raises(PeerSilentError, match="step 1 has not ended"):
            await soon(pair.decode.pull(pair.address, make_request(), make_destination(2)).result())
        assert 0.3 < time.monotonic() - started < deadlines.peer_timeout_s
        assert isinstance(await pair.offers.next_error(), PeerLostError)


async def test_a_source_that_answers_too_late_is_not_left_open(kind: str) -> None:
    answer = asyncio.Event()

    class LateOffers(Offers):
        async def open(self, request: object) -> Outgoing:
            await answer.wait()
            return await super().open(request)  # type: ignore[arg-type]

    async with make_pair(kind, IMPATIENT) as pair:
        late = LateOffers()
        late.offer(make_blocks(1))
        address = await pair.prefill.listen(host_of(kind), 0, late)
        with pytest.raises((PeerSilentError, PeerLostError)):
            await soon(pair.decode.pull(address, make_request(), make_destination(1)).result(), 1.5)
        await until(lambda: not transfer_threads("-serve"))  # it has given the loop up
        answer.set()
        assert isinstance(await late.next_error(), PeerSilentError)
        await late.assert_no_leaks()


async def test_nobody_at_the_address_is_a_lost_peer(kind: str) -> None:
    async with make_pair(kind) as pair:
        await pair.prefill.close()
        pull = pair.decode.pull(pair.address, make_request(), make_destination(1))
        with pytest.raises(PeerLostError):
            await soon(pull.result(), 1.0)
        assert await pull.wait_released()


async def test_a_peer_that_came_back_at_its_address_is_found_again(kind: str) -> None:
    """Once as a new epoch, and once as if nobody had noticed: the pooled connection is dead."""
    async with make_pair(kind) as pair:
        host, port = pair.address.removeprefix("inproc:").rsplit(":", 1)
        pair.offers.offer(make_blocks(2))
        await soon(pair.decode.pull(pair.address, make_request(epoch=1), make_destination(2)).result())
        await pair.prefill.close()
        blocks, offers = make_blocks(2, seed=1), Offers()
        offers.offer(blocks)
        successor = make_transport(kind, pair.network)
        try:
            assert await successor.listen(host, int(port), offers) == pair.address
            for epoch in (1, 2):
                destination = make_destination(2)
                await soon(pair.decode.pull(pair.address, make_request(epoch=epoch), destination).result())
                assert contents(destination) == contents(blocks)
        finally:
            await successor.close()


async def test_a_pooled_connection_that_dies_at_open_is_replaced_once(kind: str) -> None:
    num_to_break = num_accepted = 0

    def on_sending(frame: FrameType, _index: int) -> None:
        nonlocal num_to_break, num_accepted
        if frame is FrameType.ACCEPT:
            num_accepted += 1
            if num_to_break:
                num_to_break -= 1
                raise OSError("broken")

    async with make_pair(kind, prefill=Probe(on_sending=on_sending)) as pair:
        pair.offers.offer(make_blocks(1))
        for num_to_break, num_expected in ((0, 1), (1, 2)):  # noqa: B007 (the taps read it)
            num_accepted = 0
            await soon(pair.decode.pull(pair.address, make_request(), make_destination(1)).result())
            assert num_accepted == num_expected
            while pair.offers.open_by_id:
                await pair.offers.next_error()
        num_to_break, num_accepted = 9, 0
        with pytest.raises(PeerLostError):
            await soon(pair.decode.pull(pair.address, make_request(), make_destination(1)).result(), 1.0)
        assert num_accepted == 2


async def test_closing_ends_pulls_in_every_state_on_both_sides(kind: str) -> None:
    async def start(pair: Pair) -> list[asyncio.Task[object]]:
        pair.offers.offer(make_blocks(4), "running", num_finished=2)
        pair.offers.offer(make_blocks(4), "finished")
        ids = ("running", "finished", "nobody", "running")
        pulls = [
            pair.decode.pull(pair.address, make_request(handoff_id, attempt), make_destination(4))
            for attempt, handoff_id in enumerate(ids)
        ]
        await pair.offers.next_opened()
        return [asyncio.ensure_future(pull.result()) for pull in pulls]

    for is_prefill_first in (True, False):
        async with make_pair(kind) as pair:
            results = await start(pair)
            for transport in (pair.prefill, pair.decode)[:: 1 if is_prefill_first else -1]:
                await soon(transport.close(), 3.0)
                await transport.close()
            outcomes = await soon(asyncio.gather(*results, return_exceptions=True))
            assert all(isinstance(outcome, TransferError) for outcome in (outcomes[0], outcomes[2], outcomes[3]))
            assert transfer_threads() == []


async def test_a_closed_transport_starts_nothing(kind: str) -> None:
    async with make_pair(kind) as pair:
        await pair.decode.close()
        pull = pair.decode.pull(pair.address, make_request(), make_destination(1))
        with pytest.raises(AbortedError):
            await soon(pull.result())
        assert await pull.wait_released()
        with pytest.raises(RuntimeError):
            await pair.decode.listen(host_of(kind), 0, Offers())
