"""A worker's membership: it reports to every router, beats each second, and listens for beats.

Names are resolved again and again, so that routers may come and go. A router whose beat stops loses
its leases here: its calls are ended, and what they held is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from pdserve_pb import fleet_pb2 as pb
from pdserve_pb import fleet_pb2_grpc as pb_grpc
from pdserve_wire.auth import token_metadata
from pdserve_wire.channel import make_channel
from pdserve_wire.deadlines import DEADLINES
from pdserve_wire.fleet import hello_to_pb, load_to_pb
from pdserve_wire.leases import Leases
from pdserve_wire.messages import WorkerHello, WorkerLoad

logger = logging.getLogger(__name__)

_RESOLVE_INTERVAL_S = 5.0


class Reporter:
    """Reports `hello` and a fresh load to each router. Lives on the event loop."""

    def __init__(self, hello: WorkerHello, load: Callable[[], WorkerLoad], leases: Leases, token: str) -> None:
        self._hello = hello
        self._load = load
        self._leases = leases
        self._metadata = token_metadata(token)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def report_now(self) -> None:
        """Don't wait for the next beat: something changed that routers should know, as a drain."""
        self._changed.set()

    async def run(self, routers: Sequence[str]) -> None:
        """Report to whatever `routers` (host:port) resolve to, until cancelled."""
        try:
            while True:
                addresses = await _resolve(routers)
                for address in addresses - self._tasks.keys():
                    self._tasks[address] = asyncio.create_task(self._report_forever(address), name=f"report-{address}")
                for address in self._tasks.keys() - addresses if addresses else ():
                    self._tasks.pop(address).cancel()
                await asyncio.sleep(_RESOLVE_INTERVAL_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _report_forever(self, address: str) -> None:
        was_said = False
        while True:
            channel = make_channel(address)
            try:
                await self._report(channel, address)
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                if not was_said:
                    reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else "no beat"
                    logger.warning("router %s: %s; trying again each second", address, reason)
                was_said = True
            else:
                was_said = False
            finally:
                await channel.close(None)
            await asyncio.sleep(DEADLINES.beat_interval_s)

    async def _report(self, channel: grpc.aio.Channel, address: str) -> None:
        """One membership, from hello to its end. Raises when it broke."""
        router_id = ""
        call = pb_grpc.FleetStub(channel).Report(self._beats(), metadata=self._metadata)
        try:
            async with asyncio.timeout(DEADLINES.peer_timeout_s) as limit:
                async for beat in call:
                    if not router_id:
                        router_id = beat.router_id
                        logger.info("joined router %s", address)
                    limit.reschedule(asyncio.get_running_loop().time() + DEADLINES.peer_timeout_s)
        finally:
            call.cancel()
            if router_id and (num_ended := self._leases.end(router_id)):
                logger.warning("router %s is gone: %d leases ended", address, num_ended)

    async def _beats(self) -> AsyncIterator[pb.WorkerReport]:
        report = pb.WorkerReport(hello=hello_to_pb(self._hello))
        while True:
            report.load.CopyFrom(load_to_pb(self._load()))
            yield report
            report = pb.WorkerReport()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), DEADLINES.beat_interval_s)
            self._changed.clear()


async def _resolve(routers: Sequence[str]) -> set[str]:
    """Every address behind the names. A name that resolves to nothing is left out, and tried again."""
    loop = asyncio.get_running_loop()
    addresses: set[str] = set()
    for router in routers:
        host, _, port = router.rpartition(":")
        try:
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except socket.gaierror:
            continue
        for family, _, _, _, sockaddr in found:
            ip = sockaddr[0]
            addresses.add(f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}")
    return addresses
