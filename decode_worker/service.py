"""The decode role. The life of a request here:

1. `Decode(request, handoff)` is checked and queued: `Accepted`. The open call is its lease.
2. It waits, holding nothing, until there is room for its whole prompt (reservation.py).
3. Its KV is pulled from the prefill worker as that finishes it (puller.py): `KvComplete`.
4. The first token, which came with the KV, goes out; the sequence joins the running batch.
5. Tokens go out as steps make them, until one ends the sequence or the caller leaves.

Without a hand-off the worker prefills by itself: 1, then the scheduler's own queue, then 5.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.protobuf.message import DecodeError

from decode_worker.puller import Puller
from decode_worker.reservation import Reservations
from engine.block_pool import Holder
from engine.engine import Engine
from engine.errors import EngineError, RequestRefused
from engine.output_stream import StepOutput
from engine.sequence import Sequence
from kvtransfer.messages import PullResult
from pdserve_pb import worker_pb2 as pb
from pdserve_pb import worker_pb2_grpc as pb_grpc
from pdserve_wire.errors import Reason, Refused, Unavailable
from pdserve_wire.gate import Gate
from pdserve_wire.layout import first_mismatch
from pdserve_wire.messages import (
    Accepted,
    DecodeEvent,
    DecodeTimings,
    KvComplete,
    KvHandoff,
    Layout,
    MalformedMessage,
    PrefillTimings,
    Token,
    Tokens,
    WorkerRequest,
    decode_event_to_pb,
    handoff_from_pb,
    make_token,
    token_from_pb,
)

DecodeContext = grpc.aio.ServicerContext[pb.DecodeRequest, pb.DecodeEvent]


# Every state that a request can be in here. The abort test runs over this list.
DECODE_STATES = ("waiting", "pulling", "running", "prefilling")


class DecodeService(pb_grpc.DecodeServicer):
    """Serves `Decode` on one engine."""

    def __init__(self, engine: Engine, puller: Puller, gate: Gate, layout: Layout) -> None:
        self.reservations = Reservations(engine.scheduler)
        self.states: dict[str, set[str]] = {name: set() for name in DECODE_STATES}
        self._engine = engine
        self._puller = puller
        self._gate = gate
        self._layout = layout

    async def Decode(self, message: pb.DecodeRequest, context: DecodeContext) -> None:
        async def live(request: WorkerRequest, context: DecodeContext) -> None:
            if message.HasField("handoff"):
                await self._continue(request, self._check(message.handoff, request), message.pull_attempt, context)
            else:
                await self._prefill_here(request, context)

        await self._gate.serve(message.request, live, context)

    async def _continue(
        self, request: WorkerRequest, handoff: KvHandoff, pull_attempt: int, context: DecodeContext
    ) -> None:
        """The request's prompt was, or is being, computed elsewhere."""
        sequence = _sequence(request)
        try:
            self._engine.scheduler.check(sequence)
        except RequestRefused as error:
            raise Refused(str(error)) from error
        await _send(context, Accepted())
        try:
            with self._in_state("waiting", request):
                blocks = await self.reservations.reserve(handoff.num_tokens + 1, request.priority)
            try:
                result = await self._pull(request, handoff, pull_attempt, sequence, blocks)
                completed_at = time.monotonic()
                first = _first_tokens(result.done.payload)
                sequence.token_ids += [token.token_id for token in first]
                is_over = first[-1].finish_reason is not None
                if not is_over:
                    self._engine.loop.submit_computed(sequence)
            finally:
                self.reservations.settle()  # not before the sequence has taken its place
            await _send(context, _kv_complete(result))
            await _send(context, Tokens(first))
            if not is_over:
                with self._in_state("running", request):
                    await self._stream(request, sequence, context, completed_at)
        finally:
            self._let_go(sequence)

    async def _prefill_here(self, request: WorkerRequest, context: DecodeContext) -> None:
        received_at = time.monotonic()
        sequence = _sequence(request)
        try:
            self._engine.loop.submit(sequence)
        except RequestRefused as error:
            raise Refused(str(error)) from error
        try:
            await _send(context, Accepted())
            with self._in_state("prefilling", request):
                await self._stream(request, sequence, context, received_at, is_prefilled_here=True)
        finally:
            self._engine.loop.abort(sequence)

    async def _pull(
        self, request: WorkerRequest, handoff: KvHandoff, pull_attempt: int, sequence: Sequence, blocks: list[int]
    ) -> PullResult:
        """Wait for the KV. The blocks are the sequence's, held as `SEQUENCE`, on return."""
        with self._in_state("pulling", request):
            result = await self._puller.pull(handoff, pull_attempt, blocks)
        sequence.block_tables = (blocks,)
        sequence.num_computed_tokens = handoff.num_tokens
        if result.done.num_tokens != handoff.num_tokens:
            raise Unavailable(Reason.KV_LOST, f"{result.done.num_tokens} tokens of KV came, not {handoff.num_tokens}")
        return result

    async def _stream(
        self,
        request: WorkerRequest,
        sequence: Sequence,
        context: DecodeContext,
        since: float,
        is_prefilled_here: bool = False,
    ) -> None:
        """Send tokens as they are made, until the last. `since` is when the sequence was queued."""
        index = sequence.num_output_tokens
        timings: DecodeTimings | None = None
        num_chunks = 0
        is_first = True
        while True:
            try:
                outputs = await sequence.output.get()
            except EngineError as error:
                raise Unavailable(Reason.INTERNAL, str(error)) from error
            tokens: list[Token] = []
            for output in outputs:
                num_chunks += 1
                made = _tokens(request, output, index)
                index += len(made)
                tokens += made
                if made and is_first:
                    is_first = False
                    timings = _timings(sequence, output, since, num_chunks if is_prefilled_here else 0)
            if tokens:
                await _send(context, Tokens(tuple(tokens), timings))
                timings = None
                if tokens[-1].finish_reason is not None:
                    return

    def _check(self, message: pb.KvHandoff, request: WorkerRequest) -> KvHandoff:
        """Refuse what can't fit before any KV moves."""
        try:
            handoff = handoff_from_pb(message)
        except MalformedMessage as error:
            raise Refused(str(error)) from error
        if (field := first_mismatch(self._layout, handoff.layout)) is not None:
            theirs, ours = getattr(handoff.layout, field), getattr(self._layout, field)
            raise Refused(
                f"layout.{field}: prefill has {theirs}, decode has {ours}; pair workers of one model and form"
            )
        if handoff.num_tokens != len(request.token_ids):
            raise Refused(f"handoff.num_tokens {handoff.num_tokens} is not the request's {len(request.token_ids)}")
        return handoff

    def _let_go(self, sequence: Sequence) -> None:
        """Give up a sequence in whatever state: running, finished, or not handed to the scheduler yet."""
        if self._engine.scheduler.has(sequence):
            self._engine.loop.abort(sequence)
        elif not sequence.is_finished and sequence.arrival < 0:
            self._engine.pool.release(sequence.block_tables[0], Holder.SEQUENCE)
            sequence.block_tables = ([],)

    @contextmanager
    def _in_state(self, name: str, request: WorkerRequest) -> Iterator[None]:
        self.states[name].add(request.request_id)
        try:
            yield
        finally:
            self.states[name].discard(request.request_id)


async def _send(context: DecodeContext, event: DecodeEvent) -> None:
    await context.write(decode_event_to_pb(event))


def _sequence(request: WorkerRequest) -> Sequence:
    return Sequence(
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_emitted_tokens=request.num_emitted_tokens,
        sampling=request.sampling,
        priority=request.priority,
    )


def _first_tokens(payload: bytes) -> tuple[Token, ...]:
    """What DONE brought: a serialized `PrefillFirst`. Raises `Unavailable(KV_LOST)`."""
    try:
        first = pb.PrefillFirst.FromString(payload)
    except DecodeError as error:
        raise Unavailable(Reason.KV_LOST, "what came with the KV is no first token") from error
    if not first.tokens:
        raise Unavailable(Reason.KV_LOST, "no first token came with the KV")
    return tuple(token_from_pb(token) for token in first.tokens)


def _kv_complete(result: PullResult) -> KvComplete:
    return KvComplete(
        transport=result.transport,
        num_bytes=result.num_bytes,
        num_blocks=result.num_blocks,
        transfer_s=result.transfer_s,
        transfer_exposed_s=result.done.exposed_s,
        room_wait_s=result.done.open_wait_s,
        hidden_s=max(0.0, result.transfer_s - result.done.exposed_s),
        num_blocks_before_prefill_end=result.num_blocks_before_prefill_end,
    )


def _tokens(request: WorkerRequest, output: StepOutput, index: int) -> list[Token]:
    """One step's tokens; the last carries the step's finish reason."""
    last = len(output.tokens) - 1
    return [
        make_token(
            index + place,
            sampled.token_id,
            generation=request.generation,
            logprob=sampled.logprob,
            top_logprobs=sampled.top_logprobs,
            finish_reason=output.finish_reason if place == last else None,
        )
        for place, sampled in enumerate(output.tokens)
    ]


def _timings(sequence: Sequence, output: StepOutput, since: float, num_chunks: int) -> DecodeTimings:
    """Of the step that made the stream's first tokens here. `num_chunks` is 0 where prefill was elsewhere."""
    if not num_chunks:
        return DecodeTimings(decode_queue_s=output.started_at - since, first_step_s=output.ended_at - output.started_at)
    started_at = sequence.output.started_at
    return DecodeTimings(prefill=PrefillTimings(started_at - since, output.ended_at - started_at, 0, num_chunks))
