"""Whole clusters for tests: a router and workers on one event loop, with real engines, gRPC and TCP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_loader import LoadedModel, load_model
from engine.sampling import SamplingParams
from kvtransfer.transport import Transport
from pdserve.config import EngineOptions, RouterOptions, WorkerOptions
from pdserve.router_process import RouterServer
from pdserve.worker import WorkerServer, make_transport
from pdserve_wire.auth import make_token_file, read_token
from pdserve_wire.messages import Token
from pdserve_wire.timeline import RequestTimeline
from router.generation import GenerationRequest
from router.served_model import ServedModel

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
IDLE_DEADLINE_S = 10.0  # a busy machine; what is asserted is that it happens at all, and by events


@cache
def loaded_model(folder: Path, dtype: str, slot: int) -> LoadedModel:
    """Loaded once a session; an engine takes its model over, so each worker has a slot of its own."""
    torch.set_num_threads(1)
    return load_model(EngineConfig(model=folder, dtype=dtype))


@dataclass(slots=True)
class Cluster:
    """What a test drives. `timelines` are by request id."""

    router: RouterServer
    bound: dict[str, str]
    prefill: list[WorkerServer]
    decode: list[WorkerServer]
    timelines: dict[str, RequestTimeline] = field(default_factory=dict)
    num_requests: int = 0

    @property
    def workers(self) -> list[WorkerServer]:
        return [*self.prefill, *self.decode]

    def stream(
        self,
        token_ids: list[int],
        sampling: SamplingParams = GREEDY,
        request_id: str | None = None,
        timeout_s: float = 60.0,
    ) -> AsyncGenerator[tuple[Token, ...], None]:
        """Tokens of one request through the dispatcher. Close it to leave."""
        self.num_requests += 1
        request_id = request_id or f"request-{self.num_requests}"
        timeline = self.timelines[request_id] = RequestTimeline(request_id)
        request = GenerationRequest(request_id, tuple(token_ids), sampling, timeout_s=timeout_s)
        return self.router.dispatcher.generate(request, timeline)

    async def generate(self, token_ids: list[int], sampling: SamplingParams = GREEDY, **options: Any) -> list[Token]:
        async with aclosing(self.stream(token_ids, sampling, **options)) as batches:
            return [token async for batch in batches for token in batch]

    async def token_ids(self, prompt: list[int], sampling: SamplingParams = GREEDY, **options: Any) -> list[int]:
        return [token.token_id for token in await self.generate(prompt, sampling, **options)]

    async def assert_no_leaks(self) -> None:
        """All blocks free, no holders, nothing open: waited for by event, in bounded time."""
        for worker in self.workers:
            await until_freed(worker, lambda worker=worker: is_idle(worker))  # type: ignore[misc]


def is_idle(worker: WorkerServer) -> bool:
    ledger = json.loads(worker.state.ledger())
    return (
        ledger["states"]["free"] == ledger["num_blocks"]
        and not ledger["holders"]
        and not any(ledger["requests"].values())
    )


async def until_freed(worker: WorkerServer, condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds, looking again whenever the worker frees blocks or ends a step."""
    engine = worker.state.engine
    changed = engine.pool.freed.subscribe(engine.loop.stepped.subscribe())
    try:
        async with asyncio.timeout(IDLE_DEADLINE_S):
            while not condition():
                changed.clear()
                try:
                    await asyncio.wait_for(changed.wait(), 0.05)  # what is not about blocks has no event
                except TimeoutError:
                    pass
    except TimeoutError:
        raise AssertionError(f"{worker.state.worker_id}: {worker.state.ledger()}") from None


async def until(condition: Callable[[], bool], deadline_s: float = IDLE_DEADLINE_S) -> None:
    """Wait, in bounded time, for something that has no event."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A cluster to make. Pools are small, freed blocks are filled with NaN."""

    num_prefill: int = 1
    num_decode: int = 1
    dtype: str = "bfloat16"
    num_prefill_blocks: int = 256
    num_decode_blocks: int = 256
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 64
    max_model_len: int = 4096
    no_prefill_policy: str = "local"
    prefill_transport: Callable[[], Transport] = make_transport
    decode_transport: Callable[[], Transport] = make_transport


def make_worker(
    folder: Path, plan: ClusterPlan, role: str, number: int, slot: int, fleet: str, token_file: Path
) -> WorkerServer:
    num_blocks = plan.num_prefill_blocks if role == "prefill" else plan.num_decode_blocks
    options = WorkerOptions(
        engine=EngineOptions(
            model=str(folder),
            num_blocks=num_blocks,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            poison_freed_blocks=True,
        ),
        role=role,
        routers=(fleet,),
        cluster_token_file=token_file,
        worker_id=f"{role}-{number}",
        served_model_name="smol",
    )
    loaded = loaded_model(folder, plan.dtype, slot)
    engine = Engine.build(replace(loaded, max_model_len=plan.max_model_len), options.engine.engine_config(folder))
    transport = plan.prefill_transport() if role == "prefill" else plan.decode_transport()
    return WorkerServer(options, engine, read_token(token_file), transport)


@asynccontextmanager
async def cluster(folder: Path, tmp_path: Path, plan: ClusterPlan | None = None) -> AsyncIterator[Cluster]:
    """Up when entered; when left without an error, asserts that nothing leaked."""
    plan = plan or ClusterPlan()
    token_file = tmp_path / "token"
    make_token_file(token_file)
    options = RouterOptions(
        model=str(folder),
        http="127.0.0.1:0",
        grpc="127.0.0.1:0",
        fleet="127.0.0.1:0",
        cluster_token_file=token_file,
        no_prefill_policy=plan.no_prefill_policy,
    )
    router = RouterServer(options, ServedModel.load(folder, "smol", plan.max_model_len), read_token(token_file))
    async with AsyncExitStack() as stack:
        bound = await stack.enter_async_context(router.serving())
        roles = ["prefill"] * plan.num_prefill + ["decode"] * plan.num_decode
        workers = [
            make_worker(folder, plan, role, number, number, bound["fleet"], token_file)
            for number, role in enumerate(roles)
        ]
        for worker in workers:
            await stack.enter_async_context(worker.serving(asyncio.Event()))
        await until(lambda: len(router.fleet.ready("prefill", "decode")) == len(workers))
        made = Cluster(router, bound, workers[: plan.num_prefill], workers[plan.num_prefill :])
        yield made
        await made.assert_no_leaks()
