"""Membership: an open report stream, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from pdserve_pb import fleet_pb2 as pb
from pdserve_pb import fleet_pb2_grpc as pb_grpc
from pdserve_wire.auth import token_metadata
from pdserve_wire.channel import make_channel
from pdserve_wire.deadlines import DEADLINES
from pdserve_wire.fleet import hello_to_pb, load_to_pb
from pdserve_wire.messages import WorkerHello, WorkerLoad
from tests.router.makers import until
from tests.router.played_workers import LAYOUT, TOKEN, Played, PlayedWorker, played

HELLO = WorkerHello("w", "decode", "127.0.0.1:1", "", "", 7, 1, "m", 128, LAYOUT)
READY = WorkerLoad(is_ready=True)


@dataclass(slots=True)
class RawReport:
    """A report stream by hand: a worker that says just what the test wants."""

    call: Any

    async def say(self, hello: WorkerHello | None = None, load: WorkerLoad = READY) -> None:
        report = pb.WorkerReport(load=load_to_pb(load))
        if hello is not None:
            report.hello.CopyFrom(hello_to_pb(hello))
        await self.call.write(report)

    async def hear(self) -> str:
        """The router's id, from its next beat."""
        async with asyncio.timeout(5):
            beat = await self.call.read()
        return str(beat.router_id) if beat is not grpc.aio.EOF else "end"

    async def refusal(self) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            while await self.hear() != "end":
                pass
        return refused.value


@asynccontextmanager
async def reporting(made: Played, token: str = TOKEN) -> AsyncIterator[RawReport]:
    channel = make_channel(made.address)
    call = pb_grpc.FleetStub(channel).Report(metadata=token_metadata(token))
    try:
        yield RawReport(call)
    finally:
        call.cancel()
        await channel.close(None)


def members(made: Played) -> list[int]:
    return [worker.hello.epoch for worker in made.fleet.workers]


async def test_a_worker_is_a_member_from_its_hello_to_the_end_of_its_stream() -> None:
    async with played() as made:
        async with reporting(made) as worker:
            await worker.say(HELLO)
            await until(lambda: members(made) == [7])
            assert [worker.hello for worker in made.fleet.ready("decode")] == [HELLO]
            assert not made.fleet.ready("prefill", "both")
            assert made.fleet.ready("decode", model="m") and not made.fleet.ready("decode", model="other")
        await until(lambda: not made.fleet.workers)


async def test_the_router_beats_each_second_and_says_who_it_is() -> None:
    async with played() as made, reporting(made) as worker:
        await worker.say(HELLO)
        loop = asyncio.get_running_loop()
        assert await worker.hear() == "router"
        before = loop.time()
        assert await worker.hear() == "router"
        assert 0.5 < loop.time() - before < 2.5


async def test_a_worker_is_ready_as_it_says_of_itself() -> None:
    async with played() as made, reporting(made) as worker:
        await worker.say(HELLO, WorkerLoad(is_ready=False))
        await until(lambda: members(made) == [7])
        assert not made.fleet.ready("decode")
        for load, is_ready in ((READY, True), (replace(READY, is_draining=True), False), (READY, True)):
            await worker.say(load=load)
            await until(lambda is_ready=is_ready: bool(made.fleet.ready("decode")) == is_ready)  # type: ignore[misc]


async def test_a_wrong_token_is_refused() -> None:
    async with played() as made, reporting(made, "a wrong token of some length") as stranger:
        assert (await stranger.refusal()).code() is grpc.StatusCode.UNAUTHENTICATED
        assert not made.fleet.workers


@pytest.mark.parametrize(
    "hello, load, why",
    [
        (None, READY, "hello"),
        (replace(HELLO, role="router"), READY, "role"),
        (replace(HELLO, grpc_address=""), READY, "grpc_address"),
        (HELLO, WorkerLoad(step_age_s=float("nan")), "step_age_s"),
    ],
)
async def test_a_report_that_is_none_is_refused_by_name(hello: WorkerHello | None, load: WorkerLoad, why: str) -> None:
    async with played() as made, reporting(made) as stranger:
        await stranger.say(hello, load)
        refusal = await stranger.refusal()
        assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT and why in str(refusal.details())
        await until(lambda: not made.fleet.workers)


async def test_silence_makes_a_worker_unready_and_then_ends_its_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.DEADLINES", replace(DEADLINES, peer_timeout_s=0.4, open_s=0.2))
    async with played() as made, reporting(made) as silent, reporting(made) as speechless:
        await silent.say(HELLO)
        await until(lambda: members(made) == [7])
        (worker,) = made.fleet.workers
        assert worker.is_ready and made.fleet.is_known(worker)
        for report in (speechless, silent):  # one has not even said who it is
            assert (await report.refusal()).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not worker.is_ready and not made.fleet.workers and not made.fleet.is_known(worker)


async def test_a_beat_that_is_late_makes_a_member_unready_until_it_comes() -> None:
    async with played() as made, reporting(made) as late:
        await late.say(HELLO)
        await until(lambda: members(made) == [7])
        (worker,) = made.fleet.workers
        worker.beat_at -= DEADLINES.peer_timeout_s  # as after a pause of this process
        assert not worker.is_ready and not made.fleet.is_known(worker)
        await late.say()
        await until(lambda: worker.is_ready and made.fleet.is_known(worker))


async def test_a_process_takes_the_place_of_another_with_its_id_and_gives_it_back_when_it_ends_first() -> None:
    async with played() as made, reporting(made) as former:
        await former.say(HELLO)
        await until(lambda: members(made) == [7])
        async with reporting(made) as latter:
            await latter.say(replace(HELLO, epoch=8))
            await until(lambda: members(made) == [8])
            await former.say()
            await latter.say(load=replace(READY, step=1))
            await until(lambda: made.fleet.workers[0].load.step == 1)
            assert members(made) == [8]
        await until(lambda: not made.fleet.workers)
        await former.say()
        await until(lambda: members(made) == [7])
    assert not made.fleet.workers


async def test_close_ends_all_memberships_and_takes_no_new_ones() -> None:
    async with played(PlayedWorker("prefill"), PlayedWorker("decode")) as made, reporting(made) as worker:
        await made.fleet.close()
        assert not made.fleet.workers
        assert (await worker.refusal()).code() is grpc.StatusCode.UNAVAILABLE
        assert not made.fleet.workers


async def test_a_worker_tells_of_itself_for_the_status_page() -> None:
    async with played(PlayedWorker("decode")) as made:
        (worker,) = made.fleet.workers
        told = worker.as_dict()
        assert (told["worker_id"], told["role"], told["is_ready"], told["num_in_flight"]) == (
            "decode",
            "decode",
            True,
            0,
        )
        assert 0 <= told["age_s"] < DEADLINES.peer_timeout_s
