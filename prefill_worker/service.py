"""The prefill role. The life of a request here:

1. `Prefill(request)` is checked and queued; the open call is its lease.
2. The scheduler gives it every block of its prompt, or lets it wait.
3. `Started(KvHandoff)` goes to the router, which opens Decode somewhere; its pull may begin now.
4. The prompt is read in chunks; after each step the finished blocks are published to the pull.
5. The first token ends the sequence here: its blocks are offered, and the token goes out twice (on
   this stream and at the end of the pull).
6. The router closes the call, and what is left of the blocks is free again.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import grpc

from engine.engine import Engine
from engine.errors import EngineError, RequestRefused
from engine.output_stream import StepOutput
from engine.sampling import InvalidSampling
from engine.sequence import Sequence
from pdserve_pb import worker_pb2 as pb
from pdserve_pb import worker_pb2_grpc as pb_grpc
from pdserve_wire.errors import Reason, Refused, Unavailable
from pdserve_wire.gate import Gate
from pdserve_wire.messages import (
    First,
    KvHandoff,
    Layout,
    PrefillEvent,
    PrefillTimings,
    Started,
    Token,
    WorkerRequest,
    make_token,
    prefill_event_to_pb,
)
from prefill_worker.handoff_table import Handoff, HandoffTable

PrefillContext = grpc.aio.ServicerContext[pb.WorkerRequest, pb.PrefillEvent]


@dataclass(frozen=True, slots=True)
class HandoffIdentity:
    """What a `KvHandoff` says of the worker that made it."""

    address: str  # of the transfer port
    epoch: int
    layout: Layout


class PrefillService(pb_grpc.PrefillServicer):
    """Serves `Prefill` on one engine."""

    def __init__(self, engine: Engine, table: HandoffTable, gate: Gate, identity: HandoffIdentity) -> None:
        self._engine = engine
        self._table = table
        self._gate = gate
        self._identity = identity

    async def Prefill(self, request: pb.WorkerRequest, context: PrefillContext) -> None:
        await self._gate.serve(request, self._live, context)

    async def _live(self, request: WorkerRequest, context: PrefillContext) -> None:
        received_at = time.monotonic()
        sequence = Sequence(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_emitted_tokens=request.num_emitted_tokens,
            sampling=request.sampling,
            priority=request.priority,
            ends_after_first_token=True,
        )
        handoff = self._table.add(sequence)
        try:
            try:
                self._engine.loop.submit(sequence)
            except (RequestRefused, InvalidSampling) as error:
                raise Refused(str(error)) from error
            await sequence.output.started.wait()
            await _send(context, Started(self._describe(handoff)))
            try:
                last, num_chunks = await _first_token(sequence)
            except EngineError as error:
                raise Unavailable(Reason.INTERNAL, str(error)) from error
            timings = PrefillTimings(
                queue_s=sequence.output.started_at - received_at,
                prefill_s=last.ended_at - sequence.output.started_at,
                num_chunks=num_chunks,
            )
            first = prefill_event_to_pb(First((_token(request, last),), timings))
            self._table.finish(handoff, first.first.SerializeToString())
            await context.write(first)
            await asyncio.get_running_loop().create_future()  # the lease: until the caller closes it
        finally:
            self._table.close(handoff)

    def _describe(self, handoff: Handoff) -> KvHandoff:
        return KvHandoff(
            handoff_id=handoff.handoff_id,
            address=self._identity.address,
            epoch=self._identity.epoch,
            num_tokens=handoff.num_tokens,
            layout=self._identity.layout,
        )


async def _send(context: PrefillContext, event: PrefillEvent) -> None:
    await context.write(prefill_event_to_pb(event))


async def _first_token(sequence: Sequence) -> tuple[StepOutput, int]:
    """The step that chose the first token, and how many steps the prompt took. Raises `EngineError`."""
    num_chunks = 0
    while True:
        for output in await sequence.output.get():
            num_chunks += 1
            if output.tokens:
                return output, num_chunks


def _token(request: WorkerRequest, output: StepOutput) -> Token:
    (sampled,) = output.tokens
    return make_token(
        request.num_emitted_tokens,
        sampled.token_id,
        generation=request.generation,
        logprob=sampled.logprob,
        top_logprobs=sampled.top_logprobs,
        finish_reason=output.finish_reason,
    )
