"""One router process: HTTP and gRPC for clients, Fleet for workers, the dispatcher between them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pdserve.config import RouterOptions, model_name
from pdserve.lifecycle import beat, die_with_parent, setup_logging, stop_on_signals
from pdserve.models import resolve_model
from pdserve_pb import fleet_pb2_grpc as pb_grpc
from pdserve_wire.address import split_address
from pdserve_wire.auth import read_token
from pdserve_wire.channel import make_server
from pdserve_wire.deadlines import DEADLINES
from pdserve_wire.errors import PdserveError
from pdserve_wire.layout import can_pair
from router.access import ApiKeys
from router.dispatcher import Dispatcher, DispatchOptions
from router.fleet import Fleet, Worker
from router.front import Front
from router.grpc_front import Health, add_grpc_front
from router.health import Probes
from router.intake import Intake
from router.metrics import RouterMetrics, WorkerGauges
from router.openai.app import http_server, make_app
from router.served_model import ServedModel

logger = logging.getLogger(__name__)


def main(options: RouterOptions) -> int:
    """Run until SIGTERM; then finish what runs, up to the drain deadline."""
    if options.die_with_parent:
        die_with_parent()
    setup_logging("router")
    return asyncio.run(_run(options))


async def _run(options: RouterOptions) -> int:
    stop = stop_on_signals()
    beats = asyncio.create_task(beat(options.beat_fd)) if options.beat_fd is not None else None
    try:
        folder = await asyncio.get_running_loop().run_in_executor(None, resolve_model, options.model, logger.info)
        model = ServedModel.load(folder, model_name(options.model, options.served_model_name), options.max_model_len)
        async with RouterServer(options, model, read_token(options.cluster_token_file)).serving() as bound:
            if options.ready_fd is not None:
                with os.fdopen(options.ready_fd, "w") as ready:
                    ready.write(json.dumps(bound) + "\n")
            await stop.wait()
        return 0
    finally:
        if beats is not None:
            beats.cancel()


class RouterServer:
    """The parts of a router, put together."""

    def __init__(self, options: RouterOptions, model: ServedModel, token: str) -> None:
        self.fleet = Fleet(f"router-{secrets.token_hex(8)}", token)
        dispatch = DispatchOptions(max_requests=options.max_requests, no_prefill_policy=options.no_prefill_policy)
        self.dispatcher = Dispatcher(self.fleet, dispatch)
        metrics = RouterMetrics(model.name)
        metrics.registry.register(WorkerGauges(model.name, self._gauge_rows))
        keys = ApiKeys(_read_keys(options.api_keys_file))
        self.front = Front(Intake(model), self.dispatcher, metrics, api_keys=keys)
        self._options = options
        self._token = token

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[dict[str, str]]:
        """Serve until the block ends, then drain. Gives the bound addresses: http, grpc and fleet."""
        options = self._options
        fleet_server, grpc_server = make_server(self._token), make_server(None)
        pb_grpc.add_FleetServicer_to_server(self.fleet, fleet_server)
        fleet_port = fleet_server.add_insecure_port(options.fleet)
        health = await add_grpc_front(grpc_server, self.front, self._why_not_ready)
        grpc_port = grpc_server.add_insecure_port(options.grpc)
        probes = Probes(self._why_not_ready, self._ledger, self._status, self._token)
        host, port = split_address(options.http)
        await fleet_server.start()
        await grpc_server.start()
        try:
            async with http_server(make_app(self.front, probes), host, port) as http_port:
                bound = {
                    "http": f"{host}:{http_port}",
                    "grpc": f"{split_address(options.grpc)[0]}:{grpc_port}",
                    "fleet": f"{split_address(options.fleet)[0]}:{fleet_port}",
                }
                logger.info("serving: %s", json.dumps(bound))
                refresh = asyncio.create_task(_refresh_forever(health))
                try:
                    yield bound
                finally:
                    refresh.cancel()
                    self.dispatcher.is_draining = True
                    await health.refresh()
                    await self._drain()
        finally:
            await grpc_server.stop(0.5)
            await self.fleet.close()
            await fleet_server.stop(0.5)

    async def _drain(self) -> None:
        if self.dispatcher.num_in_flight:
            logger.info("draining: %d requests to finish", self.dispatcher.num_in_flight)
        try:
            async with asyncio.timeout(DEADLINES.drain_s):
                await self.dispatcher.wait_idle()
        except TimeoutError:
            logger.warning("%d requests were not finished in %g s", self.dispatcher.num_in_flight, DEADLINES.drain_s)

    def _why_not_ready(self) -> str | None:
        """`None` where a request can be served now."""
        if self.dispatcher.is_draining:
            return "this router is shutting down"
        decode = self.fleet.ready("decode", "both")
        if not decode:
            return "no decode worker is ready"
        if self.fleet.ready("both") or self._options.no_prefill_policy == "local":
            return None
        prefill = self.fleet.ready("prefill")
        if not prefill:
            return "no prefill worker is ready"
        if not any(can_pair(p.hello, d.hello) for p in prefill for d in decode):
            return "no prefill worker has the model and KV layout of a decode worker"
        return None

    async def _ledger(self) -> Mapping[str, Any]:
        workers = self.fleet.workers
        return {"workers": list(await asyncio.gather(*map(_worker_ledger, workers)))}

    def _status(self) -> Mapping[str, Any]:
        return {
            "router": {
                "router_id": self.fleet.router_id,
                "model": self.front.intake.model.name,
                "num_in_flight": self.dispatcher.num_in_flight,
                "is_draining": self.dispatcher.is_draining,
                "why_not_ready": self._why_not_ready(),
            },
            "workers": [worker.as_dict() for worker in self.fleet.workers],
        }

    def _gauge_rows(self) -> list[tuple[str, str, Any]]:
        return [(worker.worker_id, worker.hello.role, worker.load) for worker in self.fleet.workers]


async def _worker_ledger(worker: Worker) -> Mapping[str, Any]:
    try:
        ledger: Mapping[str, Any] = json.loads(await worker.client.ledger())
    except PdserveError as error:
        return {"worker_id": worker.worker_id, "error": str(error)}
    return ledger


async def _refresh_forever(health: Health) -> None:
    while True:
        await asyncio.sleep(DEADLINES.beat_interval_s)
        await health.refresh()


def _read_keys(path: Path | None) -> tuple[str, ...]:
    return tuple(path.read_text().split()) if path is not None else ()
