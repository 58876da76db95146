"""One router process: HTTP and gRPC for clients, Fleet for workers, the dispatcher between them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

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
from router.grpc_front import add_grpc_front
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
        await _Router(options, model, read_token(options.cluster_token_file)).serve(stop)
        return 0
    finally:
        if beats is not None:
            beats.cancel()


class _Router:
    """The parts of a router, put together."""

    def __init__(self, options: RouterOptions, model: ServedModel, token: str) -> None:
        self._options = options
        self._token = token
        self._fleet = Fleet(f"router-{secrets.token_hex(8)}", token)
        dispatch = DispatchOptions(max_requests=options.max_requests, no_prefill_policy=options.no_prefill_policy)
        self._dispatcher = Dispatcher(self._fleet, dispatch)
        metrics = RouterMetrics(model.name)
        metrics.registry.register(WorkerGauges(model.name, self._gauge_rows))
        self._front = Front(Intake(model), self._dispatcher, metrics, api_keys=ApiKeys(_read_keys(options.api_keys_file)))

    async def serve(self, stop: asyncio.Event) -> None:
        """Until `stop`, then drain."""
        options = self._options
        fleet_server = make_server(self._token)
        pb_grpc.add_FleetServicer_to_server(self._fleet, fleet_server)
        fleet_port = fleet_server.add_insecure_port(options.fleet)
        await fleet_server.start()
        grpc_server = make_server(None)
        health = await add_grpc_front(grpc_server, self._front, self._why_not_ready)
        grpc_port = grpc_server.add_insecure_port(options.grpc)
        await grpc_server.start()
        probes = Probes(self._why_not_ready, self._ledger, self._status, self._token)
        host, port = split_address(options.http)
        async with http_server(make_app(self._front, probes), host, port) as http_port:
            bound = {
                "http": f"{host}:{http_port}",
                "grpc": f"{split_address(options.grpc)[0]}:{grpc_port}",
                "fleet": f"{split_address(options.fleet)[0]}:{fleet_port}",
            }
            logger.info("serving: %s", json.dumps(bound))
            if options.ready_fd is not None:
                with os.fdopen(options.ready_fd, "w") as ready:
                    ready.write(json.dumps(bound) + "\n")
            refresh = asyncio.create_task(_refresh_forever(health.refresh))
            await stop.wait()
            refresh.cancel()
            self._dispatcher.is_draining = True
            await health.refresh()
            await self._drain()
        await grpc_server.stop(0.5)
        await self._fleet.close()
        await fleet_server.stop(0.5)

    async def _drain(self) -> None:
        if self._dispatcher.num_in_flight:
            logger.info("draining: %d requests to finish", self._dispatcher.num_in_flight)
        try:
            async with asyncio.timeout(DEADLINES.drain_s):
                await self._dispatcher.wait_idle()
        except TimeoutError:
            logger.warning("%d requests were not finished in %g s", self._dispatcher.num_in_flight, DEADLINES.drain_s)

    def _why_not_ready(self) -> str | None:
        """`None` where a request can be served now."""
        if self._dispatcher.is_draining:
            return "this router is shutting down"
        decode = self._fleet.ready("decode", "both")
        if not decode:
            return "no decode worker is ready"
        if self._fleet.ready("both") or self._options.no_prefill_policy == "local":
            return None
        prefill = self._fleet.ready("prefill")
        if not prefill:
            return "no prefill worker is ready"
        if not any(can_pair(p.hello, d.hello) for p in prefill for d in decode):
            return "no prefill worker has the model and KV layout of a decode worker"
        return None

    async def _ledger(self) -> Mapping[str, Any]:
        workers = self._fleet.workers
        return {"workers": list(await asyncio.gather(*map(_worker_ledger, workers)))}

    def _status(self) -> Mapping[str, Any]:
        return {
            "router": {
                "router_id": self._fleet.router_id,
                "model": self._front.intake.model.name,
                "num_in_flight": self._dispatcher.num_in_flight,
                "is_draining": self._dispatcher.is_draining,
                "why_not_ready": self._why_not_ready(),
            },
            "workers": [worker.as_dict() for worker in self._fleet.workers],
        }

    def _gauge_rows(self) -> list[tuple[str, str, Any]]:
        return [(worker.worker_id, worker.hello.role, worker.load) for worker in self._fleet.workers]


async def _worker_ledger(worker: Worker) -> Mapping[str, Any]:
    try:
        ledger: Mapping[str, Any] = json.loads(await worker.client.ledger())
    except PdserveError as error:
        return {"worker_id": worker.worker_id, "error": str(error)}
    return ledger


async def _refresh_forever(refresh: Any) -> None:
    while True:
        await asyncio.sleep(DEADLINES.beat_interval_s)
        await refresh()


def _read_keys(path: Path | None) -> tuple[str, ...]:
    return tuple(path.read_text().split()) if path is not None else ()
