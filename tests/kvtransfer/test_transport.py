"""The conformance suite of the seam: what holds for every transport."""

from __future__ import annotations

from typing import Any

import pytest

from kvtransfer.errors import AbortedError, RefusedError
from kvtransfer.messages import MAX_PAYLOAD_NBYTES
from tests.kvtransfer.makers import (
    BLOCK_NBYTES,
    KINDS,
    Offers,
    Probe,
    contents,
    host_of,
    make_blocks,
    make_destination,
    make_pair,
    make_request,
    soon,
    transfer_threads,
)

pytestmark = pytest.mark.parametrize("kind", KINDS)


async def test_all_blocks_arrive_in_order_with_what_prefill_said(kind: str) -> None:
    probe, blocks, destination = Probe(), make_blocks(70), make_destination(70)
    async with make_pair(kind, decode=probe) as pair:
        pair.offers.offer(blocks)
        request = make_request(have=("a", "b"))
        result = await soon(pair.decode.pull(pair.address, request, destination).result())
        assert await pair.offers.next_error() is None
    assert contents(destination) == contents(blocks)
    assert probe.arrivals == list(range(70))
    assert pair.offers.requests == [request]
    assert (result.done.num_tokens, result.done.payload) == (100, b"first token")
    assert (result.num_blocks, result.num_bytes) == (70, 70 * BLOCK_NBYTES)
    assert result.transport == pair.decode.name
    assert result.transfer_s > 0


async def test_large_blocks_and_the_largest_payload_arrive(kind: str) -> None:
    blocks, destination = make_blocks(3, 3 << 20), make_destination(3, 3 << 20)
    payload = bytes(MAX_PAYLOAD_NBYTES)
    async with make_pair(kind) as pair:
        pair.offers.offer(blocks, num_finished=0)
        pull = pair.decode.pull(pair.address, make_request(), destination)
        (await pair.offers.next_opened()).finish(5, payload)
        assert (await soon(pull.result())).done.payload == payload
    assert contents(destination) == contents(blocks)


async def test_a_prompt_without_missing_blocks_moves_only_the_end(kind: str) -> None:
    async with make_pair(kind) as pair:
        pair.offers.offer([])
        result = await soon(pair.decode.pull(pair.address, make_request(), []).result())
        assert (result.num_blocks, result.num_bytes, result.done.num_tokens) == (0, 0, 100)


async def test_blocks_leave_before_prefill_is_finished(kind: str) -> None:
    blocks, destination = make_blocks(6), make_destination(6)
    probe = Probe(stop_writing=4)
    async with make_pair(kind, decode=probe) as pair:
        pair.offers.offer(blocks, num_finished=2)
        pull = pair.decode.pull(pair.address, make_request(), destination)
        outgoing = await pair.offers.next_opened()
        outgoing.publish(5, 20, 2)
        assert await probe.reached.wait(20.0)
        assert contents(destination[:4]) == contents(blocks[:4])
        outgoing.finish(24, b"")
        probe.go.set()
        result = await soon(pull.result())
    assert result.num_blocks_before_prefill_end == 5
    assert result.done.open_wait_s == 0
    assert contents(destination) == contents(blocks)


async def test_finished_blocks_that_waited_to_be_asked_for_are_told_apart(kind: str) -> None:
    async with make_pair(kind) as pair:
        pair.offers.offer(make_blocks(2))
        result = await soon(pair.decode.pull(pair.address, make_request(), make_destination(2)).result())
    assert result.num_blocks_before_prefill_end == 0
    assert result.done.open_wait_s > 0
    assert result.done.exposed_s > 0


async def test_both_directions_run_at_once(kind: str) -> None:
    async with make_pair(kind) as pair:
        back = Offers()
        back_address = await pair.decode.listen(host_of(kind), 0, back)
        pulls, expected = [], []
        for n in range(6):
            blocks, destination = make_blocks(40, seed=n), make_destination(40)
            offers, address, puller = (
                (pair.offers, pair.address, pair.decode) if n % 2 else (back, back_address, pair.prefill)
            )
            offers.offer(blocks, f"h{n}")
            pulls.append(puller.pull(address, make_request(f"h{n}"), destination))
            expected.append((blocks, destination))
        for pull in pulls:
            await soon(pull.result())
        for blocks, destination in expected:
            assert contents(destination) == contents(blocks)
        assert [await back.next_error() for _ in range(3)] == [None] * 3
        await back.assert_no_leaks()


async def test_one_connection_carries_one_pull_after_the_other(kind: str) -> None:
    blocks = make_blocks(3)
    async with make_pair(kind) as pair:
        pair.offers.offer(blocks)
        for _ in range(4):
            destination = make_destination(3)
            await soon(pair.decode.pull(pair.address, make_request(), destination).result())
            assert contents(destination) == contents(blocks)
            assert await pair.offers.next_error() is None
        assert len(transfer_threads("-serve")) == 1


async def test_another_epoch_gets_another_connection(kind: str) -> None:
    async with make_pair(kind) as pair:
        pair.offers.offer(make_blocks(1))
        for epoch in (1, 2):
            await soon(pair.decode.pull(pair.address, make_request(epoch=epoch), make_destination(1)).result())
            assert await pair.offers.next_error() is None
        assert len(transfer_threads("-serve")) == 2


async def test_an_unknown_id_is_refused_by_field_and_reason(kind: str) -> None:
    destination = make_destination(2)
    async with make_pair(kind) as pair:
        pull = pair.decode.pull(pair.address, make_request("nobody"), destination)
        with pytest.raises(RefusedError) as refused:
            await soon(pull.result())
        assert await pull.wait_released()
    assert (refused.value.field, refused.value.reason) == ("handoff_id", "unknown")
    assert contents(destination) == contents(make_destination(2))


async def test_an_id_is_unknown_again_once_it_is_withdrawn(kind: str) -> None:
    async with make_pair(kind) as pair:
        pair.offers.offer(make_blocks(1))
        await soon(pair.decode.pull(pair.address, make_request(), make_destination(1)).result())
        del pair.offers.blocks["h"]
        with pytest.raises(RefusedError, match="unknown"):
            await soon(pair.decode.pull(pair.address, make_request(), make_destination(1)).result())


@pytest.mark.parametrize(
    ("field", "fields", "num_blocks", "block_nbytes"),
    [
        ("num_blocks", {}, 3, BLOCK_NBYTES),
        ("block_nbytes", {}, 2, 64),
        ("protocol", {"protocol_min": 2, "protocol_max": 9}, 2, BLOCK_NBYTES),
        ("protocol", {"protocol_min": 0, "protocol_max": 0}, 2, BLOCK_NBYTES),
    ],
)
async def test_a_destination_of_another_form_is_refused_before_kv_moves(
    kind: str, field: str, fields: dict[str, Any], num_blocks: int, block_nbytes: int
) -> None:
    destination = make_destination(num_blocks, block_nbytes)
    async with make_pair(kind) as pair:
        pair.offers.offer(make_blocks(2))
        with pytest.raises(RefusedError) as refused:
            await soon(pair.decode.pull(pair.address, make_request(**fields), destination).result())
    assert refused.value.field == field
    assert contents(destination) == contents(make_destination(num_blocks, block_nbytes))


async def test_a_range_of_protocols_is_met_within(kind: str) -> None:
    async with make_pair(kind) as pair:
        pair.offers.offer(make_blocks(1))
        request = make_request(protocol_min=0, protocol_max=99)
        await soon(pair.decode.pull(pair.address, request, make_destination(1)).result())


async def test_a_source_that_raises_is_a_refusal_at_once(kind: str) -> None:
    async with make_pair(kind) as pair:
        pair.offers.blocks["h"] = make_blocks(1)  # its number of finished blocks is missing: KeyError
        with pytest.raises(RefusedError, match="internal"):
            await soon(pair.decode.pull(pair.address, make_request(), make_destination(1)).result(), 1.0)


async def test_a_failed_prefill_tells_why(kind: str) -> None:
    probe = Probe(stop_writing=1)
    async with make_pair(kind, decode=probe) as pair:
        pair.offers.offer(make_blocks(4), num_finished=2)
        pull = pair.decode.pull(pair.address, make_request(), make_destination(4))
        outgoing = await pair.offers.next_opened()
        assert await probe.reached.wait(20.0)
        outgoing.fail("preempted")
        probe.go.set()
        with pytest.raises(AbortedError, match="preempted"):
            await soon(pull.result(), 1.0)
        assert isinstance(await pair.offers.next_error(), AbortedError)


async def test_a_destination_that_cannot_be_one_is_the_callers_error(kind: str) -> None:
    async with make_pair(kind) as pair:
        wrong = (
            [memoryview(b"read-only")],
            [memoryview(bytearray(8))[::2]],
            [memoryview(bytearray(8)), memoryview(bytearray(9))],
        )
        for blocks in wrong:
            with pytest.raises(ValueError, match="block"):
                pair.decode.pull(pair.address, make_request(), blocks)


async def test_an_address_is_taken_once(kind: str) -> None:
    async with make_pair(kind) as pair:
        host, port = pair.address.removeprefix("inproc:").rsplit(":", 1)
        with pytest.raises(OSError, match="in use"):
            await pair.prefill.listen(host, int(port), Offers())
