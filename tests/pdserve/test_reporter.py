"""A worker's membership, against a real gRPC server that plays a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.reporter import Reporter
from pdserve_pb import fleet_pb2 as pb
from pdserve_pb import fleet_pb2_grpc as pb_grpc
from pdserve_wire.channel import make_server
from pdserve_wire.leases import Leases
from pdserve_wire.messages import Layout, WorkerHello, WorkerLoad

TOKEN = "a cluster token of some length"
LAYOUT = Layout("bfloat16", 16, 2, 1, 64, 8192, "llama", "t", "p")
HELLO = WorkerHello("w", "decode", "127.0.0.1:1", "127.0.0.1:2", "", 7, 1, "m", 128, LAYOUT)


class PlayedRouter(pb_grpc.FleetServicer):
    """Beats while `is_beating`; its stream stays open all the same, as that of a router whose loop is stuck."""

    def __init__(self) -> None:
        self.is_beating = True
        self.num_joins = 0
        self.reports: asyncio.Queue[pb.WorkerReport] = asyncio.Queue()

    async def Report(self, reports: AsyncIterator[pb.WorkerReport], context: Any) -> None:
        self.num_joins += 1
        reading = asyncio.create_task(self._read(reports))
        try:
            while True:
                if self.is_beating:
                    await context.write(pb.RouterBeat(router_id="router-1"))
                await asyncio.sleep(0.2)
        finally:
            reading.cancel()

    async def _read(self, reports: AsyncIterator[pb.WorkerReport]) -> None:
        async for report in reports:
            self.reports.put_nowait(report)


@asynccontextmanager
async def reporting(leases: Leases) -> AsyncIterator[tuple[PlayedRouter, Reporter]]:
    router = PlayedRouter()
    server = make_server(TOKEN)
    pb_grpc.add_FleetServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reporter = Reporter(HELLO, lambda: WorkerLoad(is_ready=True), leases, TOKEN)
    task = asyncio.create_task(reporter.run([f"127.0.0.1:{port}"]))
    try:
        yield router, reporter
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)


async def test_a_worker_says_who_it_is_once_and_how_it_is_each_second() -> None:
    async with reporting(Leases()) as (router, _):
        first = await asyncio.wait_for(router.reports.get(), 5)
        assert first.hello.worker_id == "w" and first.load.ready
        second = await asyncio.wait_for(router.reports.get(), 5)
        assert not second.HasField("hello") and second.load.ready


async def test_a_change_is_reported_at_once() -> None:
    async with reporting(Leases()) as (router, reporter):
        await asyncio.wait_for(router.reports.get(), 5)
        reporter.report_now()
        await asyncio.wait_for(router.reports.get(), 0.5)


@pytest.mark.timeout(60)
async def test_a_router_whose_beat_stops_loses_its_leases_and_another_router_keeps_its_own() -> None:
    leases = Leases()

    async def call(router_id: str) -> None:
        with leases.lease(router_id):
            await asyncio.get_running_loop().create_future()

    mine, other = asyncio.create_task(call("router-1")), asyncio.create_task(call("router-2"))
    async with reporting(leases) as (router, _):
        await asyncio.wait_for(router.reports.get(), 5)
        assert len(leases) == 2
        router.is_beating = False
        await asyncio.wait_for(asyncio.wait([mine]), 8)
        assert mine.cancelled() and not other.done()
        router.is_beating = True
        async with asyncio.timeout(10):
            while router.num_joins < 2:
                await asyncio.sleep(0.05)
    other.cancel()
    await asyncio.gather(mine, other, return_exceptions=True)
