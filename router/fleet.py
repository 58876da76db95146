"""Which workers there are. A worker's open `Fleet.Report` stream is its membership.

Workers dial every router and beat each second; the router beats back. A worker whose stream breaks is
gone at once; one whose beats stop is not ready from then on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from pdserve_pb import fleet_pb2 as pb
from pdserve_pb import fleet_pb2_grpc as pb_grpc
from pdserve_wire.deadlines import DEADLINES
from pdserve_wire.fleet import hello_from_pb, load_from_pb
from pdserve_wire.messages import MalformedMessage, WorkerHello, WorkerLoad
from router.worker_client import WorkerClient

logger = logging.getLogger(__name__)

ReportContext = grpc.aio.ServicerContext[pb.WorkerReport, pb.RouterBeat]


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process as this router sees it."""

    hello: WorkerHello
    client: WorkerClient
    load: WorkerLoad = field(default_factory=WorkerLoad)
    beat_at: float = field(default_factory=time.monotonic)
    num_in_flight: int = 0  # calls of this router
    is_suspect: bool = False  # a call to it broke, and it has not beaten since

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    @property
    def beat_age_s(self) -> float:
        return time.monotonic() - self.beat_at

    @property
    def is_ready(self) -> bool:
        is_heard = self.beat_age_s < DEADLINES.peer_timeout_s and not self.is_suspect
        return is_heard and self.load.is_ready and not self.load.is_draining

    def as_dict(self) -> dict[str, Any]:
        """For `/debug/status` and `pdserve status`."""
        return {
            "worker_id": self.worker_id,
            "role": self.hello.role,
            "model": self.hello.model,
            "grpc_address": self.hello.grpc_address,
            "transfer_address": self.hello.transfer_address,
            "metrics_address": self.hello.metrics_address,
            "epoch": self.hello.epoch,
            "pid": self.hello.pid,
            "is_ready": self.is_ready,
            "is_draining": self.load.is_draining,
            "num_running": self.load.num_running,
            "num_waiting": self.load.num_waiting,
            "num_in_flight": self.num_in_flight,
            "kv_blocks": self.load.kv_blocks,
            "num_blocks": self.load.num_blocks,
            "step": self.load.step,
            "age_s": self.beat_age_s,
        }


class Fleet(pb_grpc.FleetServicer):
    """The workers that report to this router. Lives on the event loop."""

    def __init__(self, router_id: str, token: str) -> None:
        self.router_id = router_id
        self._token = token
        self._workers: dict[str, Worker] = {}
        self._streams: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def ready(self, *roles: str, model: str = "") -> list[Worker]:
        """Those that take requests now; of one served model, if `model` names it."""
        return [
            worker
            for worker in self._workers.values()
            if worker.hello.role in roles and worker.is_ready and model in ("", worker.hello.model)
        ]

    def is_known(self, worker: Worker) -> bool:
        """Whether it is still a member, and heard of lately."""
        return self._workers.get(worker.worker_id) is worker and worker.beat_age_s < 2.5 * DEADLINES.beat_interval_s

    async def Report(self, reports: AsyncIterator[pb.WorkerReport], context: ReportContext) -> None:
        if self._is_closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this router is shutting down")
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            await self._serve(reports, context)
        except MalformedMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no beat; report again")
        finally:
            self._streams.discard(task)

    async def _serve(self, reports: AsyncIterator[pb.WorkerReport], context: ReportContext) -> None:
        """One membership. Its beats end before it does: gRPC drops a status that is sent while they are."""
        stream = aiter(reports)
        async with asyncio.timeout(DEADLINES.open_s):
            report = await anext(stream, None)
        if report is None:
            return
        worker = self._join(report)
        beats = asyncio.create_task(self._beat(context), name="router-beat")
        try:
            async with asyncio.timeout(DEADLINES.peer_timeout_s) as limit:
                async for report in stream:
                    limit.reschedule(asyncio.get_running_loop().time() + DEADLINES.peer_timeout_s)
                    worker.load = load_from_pb(report.load)
                    worker.beat_at = time.monotonic()
                    worker.is_suspect = False
                    # another process that had taken its id may be gone
                    self._workers.setdefault(worker.worker_id, worker)
        finally:
            await self._leave(worker)
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)

    async def close(self) -> None:
        """End all memberships, and take no new ones."""
        self._is_closed = True
        for task in list(self._streams):
            task.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    def _join(self, report: pb.WorkerReport) -> Worker:
        if not report.HasField("hello"):
            raise MalformedMessage("the first report of a stream must carry hello")
        hello = hello_from_pb(report.hello)
        load = load_from_pb(report.load)
        worker = Worker(hello, WorkerClient(hello.grpc_address, self._token), load)
        self._workers[hello.worker_id] = worker  # a restarted process takes its former self's place
        logger.info("%s worker %s joined: %s, epoch %d", hello.role, hello.worker_id, hello.grpc_address, hello.epoch)
        return worker

    async def _leave(self, worker: Worker) -> None:
        if self._workers.get(worker.worker_id) is worker:
            del self._workers[worker.worker_id]
        logger.info("%s worker %s left", worker.hello.role, worker.worker_id)
        await worker.client.close()

    async def _beat(self, context: ReportContext) -> None:
        while True:
            await context.write(pb.RouterBeat(router_id=self.router_id))
            await asyncio.sleep(DEADLINES.beat_interval_s)
