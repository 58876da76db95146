"""Workers that are played: real gRPC servers that follow scripts, members of a real fleet. No model, no engine.

A script is an async generator: it yields events, awaits what it waits for, and raises what the call fails by.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from engine.sampling import SamplingParams
from pdserve.reporter import Reporter
from pdserve_pb import fleet_pb2_grpc, worker_pb2_grpc
from pdserve_pb import worker_pb2 as pb
from pdserve_wire.channel import make_server
from pdserve_wire.errors import PdserveError, Reason, Refused, Unavailable, to_status
from pdserve_wire.leases import Leases
from pdserve_wire.messages import (
    Accepted,
    DecodeEvent,
    First,
    KvComplete,
    KvHandoff,
    Layout,
    PrefillEvent,
    PrefillTimings,
    Started,
    Token,
    Tokens,
    WorkerHello,
    WorkerLoad,
    WorkerRequest,
    decode_event_to_pb,
    handoff_from_pb,
    prefill_event_to_pb,
    request_from_pb,
)
from pdserve_wire.timeline import RequestTimeline
from router.dispatcher import Dispatcher, DispatchOptions
from router.fleet import Fleet
from router.generation import GenerationRequest
from tests.router.makers import until

TOKEN = "a cluster token of some length"
LAYOUT = Layout("bfloat16", 16, 2, 1, 64, 8192, "llama", "t", "p")
PROMPT = (11, 12, 13)
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)
KV_COMPLETE = KvComplete("tcp", 8192, 1, 0.1, 0.0, 0.0, 0.1, 1)


@dataclass(slots=True, eq=False)
class PlayedCall:
    """One call as the worker sees it. `ended` is set when the caller has closed it, or its script is over."""

    request: WorkerRequest
    handoff: KvHandoff | None = None
    pull_attempt: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: bool = False


Event = PrefillEvent | DecodeEvent
Script = Callable[[PlayedCall], AsyncIterator[Event]]


def token_at(index: int, request: WorkerRequest) -> Token:
    """The token that every worker makes at `index`: sampling is a pure function."""
    is_last = index + 1 == request.sampling.max_tokens
    return Token(index, 1000 + index, generation=request.generation, finish_reason="length" if is_last else None)


def started(call: PlayedCall) -> Started:
    request = call.request
    handoff_id = f"{request.request_id}/{request.generation}"
    return Started(KvHandoff(handoff_id, "127.0.0.1:1", 1, len(request.token_ids), LAYOUT))


def first(call: PlayedCall) -> First:
    return First((token_at(call.request.num_emitted_tokens, call.request),), PrefillTimings(num_chunks=1))


def tokens(call: PlayedCall, first_index: int, end: int | None = None) -> list[Tokens]:
    """The tokens from `first_index` on, one an event."""
    request = call.request
    end = request.sampling.max_tokens if end is None else end
    return [Tokens((token_at(index, request),)) for index in range(first_index, end)]


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def honest_prefill(call: PlayedCall) -> AsyncIterator[Event]:
    yield started(call)
    yield first(call)
    await forever()


async def honest_decode(call: PlayedCall) -> AsyncIterator[Event]:
    yield Accepted()
    if call.handoff is not None:
        yield KV_COMPLETE
    for event in tokens(call, call.request.num_emitted_tokens):
        yield event


async def silent(call: PlayedCall) -> AsyncIterator[Event]:
    await forever()
    yield


def failing_with(reason: Reason, message: str) -> Script:
    """A worker that answers nothing but this."""

    async def script(call: PlayedCall) -> AsyncIterator[Event]:
        raise Refused(message) if reason is Reason.REFUSED else Unavailable(reason, message)
        yield

    return script


class PlayedWorker(worker_pb2_grpc.PrefillServicer, worker_pb2_grpc.DecodeServicer):
    """One worker process, as far as others can see. Its script may be changed at any time."""

    def __init__(
        self, role: str, script: Script | None = None, worker_id: str = "", model: str = "m", layout: Layout = LAYOUT
    ) -> None:
        self.script = script or (honest_prefill if role == "prefill" else honest_decode)
        self.load = WorkerLoad(is_ready=True)
        self.hello = WorkerHello(worker_id or role, role, "", "", "", id(self), 1, model, 128, layout)
        self.calls: list[PlayedCall] = []
        self._server = make_server(TOKEN)
        self._reporting: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        return sum(not call.ended.is_set() for call in self.calls)

    async def start(self, router: str) -> None:
        worker_pb2_grpc.add_PrefillServicer_to_server(self, self._server)
        worker_pb2_grpc.add_DecodeServicer_to_server(self, self._server)
        self.hello = replace(self.hello, grpc_address=f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}")
        await self._server.start()
        self.reporter = Reporter(self.hello, lambda: self.load, Leases(), TOKEN)
        self._reporting = asyncio.create_task(self.reporter.run([router]))

    async def stop_reporting(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)

    async def break_calls(self) -> None:
        """The server is gone, with all its calls; its membership is still there."""
        await self._server.stop(0)

    async def die(self) -> None:
        await self.break_calls()
        await self.stop_reporting()

    async def Prefill(self, request: pb.WorkerRequest, context: Any) -> None:
        await self._play(PlayedCall(request_from_pb(request)), context)

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> None:
        handoff = handoff_from_pb(request.handoff) if request.HasField("handoff") else None
        await self._play(PlayedCall(request_from_pb(request.request), handoff, request.pull_attempt), context)

    async def _play(self, call: PlayedCall, context: Any) -> None:
        self.calls.append(call)
        to_pb: Any = prefill_event_to_pb if self.hello.role == "prefill" else decode_event_to_pb
        try:
            async for event in self.script(call):
                await context.write(to_pb(event))
        except asyncio.CancelledError:
            call.was_cancelled = True
            raise
        except PdserveError as error:
            await context.abort(*to_status(error))
        finally:
            call.ended.set()


@dataclass(slots=True)
class Played:
    """What a test drives."""

    fleet: Fleet
    dispatcher: Dispatcher
    address: str
    stack: AsyncExitStack
    timelines: list[RequestTimeline] = field(default_factory=list)

    async def join(self, *workers: PlayedWorker) -> None:
        """Start workers, and wait until the router knows them."""
        for worker in workers:
            await worker.start(self.address)
            self.stack.push_async_callback(worker.die)
        await until(lambda: {w.hello.epoch for w in workers} <= {w.hello.epoch for w in self.fleet.workers})

    def stream(
        self, sampling: SamplingParams = GREEDY, timeout_s: float = 20.0, model: str = "m"
    ) -> AsyncGenerator[tuple[Token, ...], None]:
        """Batches of tokens of one request. Close it to leave."""
        timeline = RequestTimeline(f"request-{len(self.timelines)}")
        self.timelines.append(timeline)
        request = GenerationRequest(timeline.request_id, PROMPT, sampling, model, timeout_s)
        return self.dispatcher.generate(request, timeline)

    async def generate(self, sampling: SamplingParams = GREEDY, **options: Any) -> list[Token]:
        return await _read(self.stream(sampling, **options))

    def begin(self, sampling: SamplingParams = GREEDY, **options: Any) -> asyncio.Task[list[Token]]:
        """A request whose timeline is there at once."""
        return asyncio.create_task(_read(self.stream(sampling, **options)))

    async def assert_no_leaks(self) -> None:
        """No call, no count, no task is left; waited for, since the calls' ends travel."""
        await until(lambda: not self.dispatcher.num_in_flight)
        await until(lambda: not any(worker.num_in_flight for worker in self.fleet.workers))
        await until(lambda: not readers())


async def _read(stream: AsyncGenerator[tuple[Token, ...], None]) -> list[Token]:
    async with aclosing(stream) as batches, asyncio.timeout(30):
        return [token async for batch in batches for token in batch]


def readers() -> list[asyncio.Task[Any]]:
    """Tasks that read a worker's stream."""
    return [task for task in asyncio.all_tasks() if task.get_name() == "read-worker-stream"]


@asynccontextmanager
async def played(*workers: PlayedWorker, options: DispatchOptions | None = None) -> AsyncIterator[Played]:
    """A router's fleet and dispatcher, with these workers in it. Asserts at the end that nothing is left open."""
    fleet = Fleet("router", TOKEN)
    server = make_server(TOKEN)
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        stack.push_async_callback(fleet.close)
        made = Played(fleet, Dispatcher(fleet, options or DispatchOptions()), address, stack)
        await made.join(*workers)
        yield made
        await made.assert_no_leaks()
        for worker in workers:
            await until(lambda worker=worker: not worker.num_open)  # type: ignore[misc]


def assert_whole(received: Sequence[Token], max_tokens: int = GREEDY.max_tokens) -> None:
    """Every index once, in order, each with its one right token, and an end."""
    assert [(token.index, token.token_id) for token in received] == [(i, 1000 + i) for i in range(max_tokens)]
    assert [token.finish_reason for token in received] == [None] * (max_tokens - 1) + ["length"]
