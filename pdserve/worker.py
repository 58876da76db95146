"""One worker process: one engine, one role.

Start: weights load on a thread while the loop beats; then the ports open, and the worker reports to
the routers. End: SIGTERM drains (what runs finishes, nothing new is taken), then the ports close.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc

from decode_worker.puller import Puller
from decode_worker.service import DecodeService
from engine.engine import Engine
from kvtransfer.messages import TransferDeadlines
from kvtransfer.tcp import TcpTransport
from kvtransfer.transport import Transport
from pdserve.config import WorkerOptions, model_name
from pdserve.lifecycle import beat, die_with_parent, setup_logging, stop_on_signals
from pdserve.metrics import MetricsServer
from pdserve.models import resolve_model
from pdserve.reporter import Reporter
from pdserve.worker_state import WorkerState
from pdserve_pb import worker_pb2 as pb
from pdserve_pb import worker_pb2_grpc as pb_grpc
from pdserve_wire.address import split_address
from pdserve_wire.auth import read_token
from pdserve_wire.channel import make_server
from pdserve_wire.deadlines import DEADLINES
from pdserve_wire.gate import Gate
from pdserve_wire.leases import Leases
from pdserve_wire.messages import Layout, WorkerHello
from prefill_worker.handoff_table import HandoffTable
from prefill_worker.service import HandoffIdentity, PrefillService

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0


def main(options: WorkerOptions) -> int:
    """Run until SIGTERM. The exit code is not 0 when the process must be replaced."""
    if options.die_with_parent:
        die_with_parent()
    setup_logging(options.worker_id or options.role)
    return asyncio.run(_run(options))


def layout_of(engine: Engine) -> Layout:
    """What two workers must have in common to exchange KV."""
    shape, identity = engine.cache.shape, engine.loaded.identity
    return Layout(
        dtype=str(shape.dtype).removeprefix("torch."),
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_nbytes=shape.block_nbytes,
        base_model=identity.base_model,
        tokenizer=identity.tokenizer,
        position_encoding=identity.position_encoding,
        weights=identity.weights,
    )


def make_transport() -> Transport:
    """The transport of `--transport auto` and `tcp`, with the one table of deadlines."""
    return TcpTransport(
        TransferDeadlines(
            connect_s=DEADLINES.connect_s,
            open_s=DEADLINES.open_s,
            peer_timeout_s=DEADLINES.peer_timeout_s,
            working_interval_s=DEADLINES.working_interval_s,
            release_s=DEADLINES.release_s,
            stuck_step_s=DEADLINES.stuck_step_s,
        )
    )


async def _run(options: WorkerOptions) -> int:
    stop = stop_on_signals()
    beats = asyncio.create_task(beat(options.beat_fd)) if options.beat_fd is not None else None
    try:
        token = read_token(options.cluster_token_file)
        engine = await asyncio.get_running_loop().run_in_executor(None, _load, options)
        worker = WorkerServer(options, engine, token, make_transport())
        async with worker.serving(stop):
            await stop.wait()
        return 1 if worker.state.needs_restart else 0
    finally:
        if beats is not None:
            beats.cancel()


def _load(options: WorkerOptions) -> Engine:
    started_at = time.monotonic()
    logger.info("loading %s", options.engine.model)
    folder = resolve_model(options.engine.model, logger.info)
    engine = Engine.load(options.engine.engine_config(folder))
    shape = engine.cache.shape
    logger.info(
        "loaded in %.1f s: %s, %d KV blocks of %d tokens (%.2f GB)",
        time.monotonic() - started_at,
        str(shape.dtype).removeprefix("torch."),
        engine.pool.num_blocks,
        shape.block_size,
        engine.pool.num_blocks * shape.block_nbytes / 1e9,
    )
    return engine


@dataclass(slots=True)
class _Rates:
    """For the line that a busy worker logs now and then."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_bytes: int = 0


class _Control(pb_grpc.ControlServicer):
    def __init__(self, state: WorkerState, stop: asyncio.Event) -> None:
        self._state = state
        self._stop = stop

    async def Ledger(self, request: pb.LedgerRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.LedgerResponse:
        return pb.LedgerResponse(worker_id=self._state.worker_id, json=self._state.ledger())

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.DrainResponse:
        self._stop.set()
        return pb.DrainResponse()


class WorkerServer:
    """The parts of a worker, put together."""

    def __init__(self, options: WorkerOptions, engine: Engine, token: str, transport: Transport) -> None:
        model = model_name(options.engine.model, options.served_model_name)
        epoch = secrets.randbits(63)
        layout = layout_of(engine)
        gate = Gate(Leases(), model, engine.loaded.vocab_size, options.max_waiting)
        puller = Puller(engine, transport, layout)
        self.state = WorkerState(
            worker_id=options.worker_id or f"{options.role}-{secrets.token_hex(4)}",
            role=options.role,
            engine=engine,
            gate=gate,
            table=HandoffTable(engine, layout, epoch),
            puller=puller,
            decode=DecodeService(engine, puller, gate, layout),
        )
        self._options = options
        self._token = token
        self._transport = transport
        self._hello = WorkerHello(
            worker_id=self.state.worker_id,
            role=options.role,
            grpc_address="",
            transfer_address="",
            metrics_address="",
            epoch=epoch,
            pid=os.getpid(),
            model=model,
            max_model_len=engine.loaded.max_model_len,
            layout=layout,
        )

    @asynccontextmanager
    async def serving(self, stop: asyncio.Event) -> AsyncIterator[WorkerHello]:
        """Serve until the block ends, then drain. Sets `stop` when only a new process helps."""
        options, state, engine = self._options, self.state, self.state.engine
        transfer_address = await self._listen_for_transfers()
        server = make_server(self._token)
        if options.role == "prefill":
            identity = HandoffIdentity(transfer_address, self._hello.epoch, self._hello.layout)
            pb_grpc.add_PrefillServicer_to_server(PrefillService(engine, state.table, state.gate, identity), server)
        else:
            pb_grpc.add_DecodeServicer_to_server(state.decode, server)
        pb_grpc.add_ControlServicer_to_server(_Control(state, stop), server)
        metrics = MetricsServer(*split_address(options.metrics), state, self._hello.model)
        hello = replace(
            self._hello,
            grpc_address=f"{options.advertise}:{server.add_insecure_port(options.grpc)}",
            transfer_address=transfer_address,
            metrics_address=f"{options.advertise}:{metrics.port}",
        )
        engine.loop.start()
        await server.start()
        logger.info("serving on %s, transfers on %s", hello.grpc_address, hello.transfer_address)
        reporter = Reporter(hello, state.load, state.gate.leases, self._token)
        tasks = [
            asyncio.create_task(reporter.run(options.routers)),
            asyncio.create_task(state.table.publish_steps()),
            asyncio.create_task(state.decode.reservations.serve()),
            asyncio.create_task(self._watch(stop)),
        ]
        try:
            yield hello
            await self._drain(reporter)
        finally:
            await server.stop(0.5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._transport.close()
            await engine.loop.stop()
            await asyncio.to_thread(metrics.close)

    async def _listen_for_transfers(self) -> str:
        host, port = split_address(self._options.transfer)
        bound = await self._transport.listen(host, port, self.state.table)
        return f"{self._options.advertise}:{split_address(bound)[1]}"

    async def _drain(self, reporter: Reporter) -> None:
        gate = self.state.gate
        gate.is_draining = True
        reporter.report_now()
        if gate.leases:
            logger.info("draining: %d requests to finish", len(gate.leases))
        try:
            async with asyncio.timeout(DEADLINES.drain_s):
                await gate.leases.wait_empty()
        except TimeoutError:
            logger.warning("%d requests were not finished in %g s", gate.leases.end_all(), DEADLINES.drain_s)

    async def _watch(self, stop: asyncio.Event) -> None:
        """Log a line while busy, and stop when only a new process helps."""
        last = _Rates()
        while True:
            await asyncio.sleep(LOG_INTERVAL_S)
            if reason := self.state.needs_restart:
                logger.error("%s: draining, to be restarted", reason)
                stop.set()
            last = self._log_load(last)

    def _log_load(self, last: _Rates) -> _Rates:
        load = self.state.load()
        now = _Rates(load.num_prompt_tokens, load.num_generation_tokens, load.num_transfer_bytes)
        if now != last:
            logger.info(
                "prompt %.0f tok/s, generation %.0f tok/s, running %d, waiting %d, KV %.0f %%, moved %.1f MB/s",
                (now.num_prompt_tokens - last.num_prompt_tokens) / LOG_INTERVAL_S,
                (now.num_generation_tokens - last.num_generation_tokens) / LOG_INTERVAL_S,
                load.num_running,
                load.num_waiting,
                100 * (1 - load.kv_blocks["free"] / load.num_blocks),
                (now.num_bytes - last.num_bytes) / LOG_INTERVAL_S / 1e6,
            )
        return now
