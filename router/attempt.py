"""One generation of a request: from its tokens so far to its end, or to a failure.

    Prefill opened --Started--> Decode opened --Accepted--> KvComplete: Prefill closed --> tokens --> end
             `---- first token, held until Decode has accepted ----^

Both streams feed one queue, and this one coroutine reads it. A token is emitted when its index is the
next; an earlier one is a second source of the same token and is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from pdserve_wire.deadlines import DEADLINES
from pdserve_wire.errors import PdserveError, Reason, Refused, Unavailable
from pdserve_wire.messages import (
    Accepted,
    DecodeEvent,
    First,
    KvComplete,
    KvHandoff,
    PrefillEvent,
    Started,
    Token,
    Tokens,
    WorkerRequest,
)
from pdserve_wire.timeline import RequestTimeline
from router.fleet import Fleet, Worker
from router.policy import identity, pick_decode
from router.worker_client import EventStream

logger = logging.getLogger(__name__)

MAX_PULLS = 3  # Decode is opened so often for one hand-off before everything is built again


class _Call:
    """An open stream, the task that reads it into the queue, and the worker that it counts for."""

    def __init__(self, worker: Worker, stream: EventStream[Any], queue: _Queue) -> None:
        self.worker = worker
        self._stream = stream
        self._queue = queue
        self.is_closed = False
        self._reader = asyncio.create_task(self._read(), name="read-worker-stream")
        worker.num_in_flight += 1

    def close(self) -> None:
        """Give the lease back. Never waits."""
        if not self.is_closed:
            self.is_closed = True
            self.worker.num_in_flight -= 1
            self._reader.cancel()
            self._stream.close()

    async def _read(self) -> None:
        try:
            async for event in self._stream:
                self._queue.put_nowait((self, event))
            self._queue.put_nowait((self, Unavailable(Reason.LOST_PEER, "the worker ended the call too early")))
        except PdserveError as error:
            self._queue.put_nowait((self, error))


_Queue = asyncio.Queue[tuple[_Call, PrefillEvent | DecodeEvent | PdserveError]]


class Attempt:
    """`emitted` is all that the client has; the caller appends to it what `run` yields.

    `avoid` names workers that have failed this request, and grows. Without a `prefill_worker` the
    decode worker prefills by itself.
    """

    def __init__(
        self,
        fleet: Fleet,
        request: WorkerRequest,
        emitted: list[Token],
        timeline: RequestTimeline,
        avoid: set[tuple[str, int]],
        prefill_worker: Worker | None,
    ) -> None:
        self._fleet = fleet
        self._request = request
        self._emitted = emitted
        self._timeline = timeline
        self._avoid = avoid
        self._prefill_worker = prefill_worker
        self._queue: _Queue = asyncio.Queue()
        self._prefill: _Call | None = None
        self._decode: _Call | None = None
        self._handoff: KvHandoff | None = None
        self._num_pulls = 0
        self._first: tuple[Token, ...] = ()  # made by prefill, not emitted yet
        self._has_accepted = False
        self._kv_deadline: float | None = None  # prefill is gone: by then decode has the KV, or says no

    async def run(self, deadline: float) -> AsyncGenerator[tuple[Token, ...], None]:
        """Tokens until one has a finish_reason. Raises `Refused`, or `Unavailable` when this attempt has
        failed or the event loop's `deadline` passes. Closing the iterator closes both calls.
        """
        try:
            if self._timeline.admitted_at is None:
                self._timeline.admitted_at = time.monotonic()
            if self._prefill_worker is None:
                self._timeline.decision = self._timeline.decision or "local"
                self._open_decode()
            else:
                self._timeline.decision = self._timeline.decision or "remote"
                self._timeline.prefill_worker = self._prefill_worker.worker_id
                self._prefill = _Call(
                    self._prefill_worker, self._prefill_worker.client.prefill(self._request), self._queue
                )
            while True:
                call, event = await self._next(deadline)
                tokens: tuple[Token, ...] = ()
                if call is self._prefill:
                    tokens = self._on_prefill(event)
                elif call is self._decode:
                    tokens = self._on_decode(event)
                if tokens:
                    yield tokens
                    if tokens[-1].finish_reason is not None:
                        return
        finally:
            for open_call in (self._prefill, self._decode):
                if open_call is not None:
                    open_call.close()

    async def _next(self, deadline: float) -> tuple[_Call, PrefillEvent | DecodeEvent | PdserveError]:
        by = deadline if self._kv_deadline is None else min(deadline, self._kv_deadline)
        try:
            async with asyncio.timeout_at(by):
                return await self._queue.get()
        except TimeoutError:
            if by == deadline:
                raise Unavailable(Reason.NO_ROOM, "the request's deadline passed before it was finished") from None
            raise Unavailable(Reason.KV_LOST, "prefill is gone and decode has not said whether it has the KV") from None

    def _on_prefill(self, event: PrefillEvent | DecodeEvent | PdserveError) -> tuple[Token, ...]:
        match event:
            case Started(handoff):
                self._handoff = handoff
                if self._request.sampling.max_tokens - self._request.num_emitted_tokens > 1:
                    self._open_decode()
            case First(tokens, timings):
                self._timeline.prefill = self._timeline.prefill or timings
                self._first = tokens
                if self._has_accepted or tokens[-1].finish_reason is not None:
                    return self._emit(tokens)
            case PdserveError():
                self._note_failure(self._prefill, event)
                if self._decode is None or isinstance(event, Refused):
                    raise event
                self._close_prefill()
                self._kv_deadline = asyncio.get_running_loop().time() + DEADLINES.peer_timeout_s + DEADLINES.open_s
        return ()

    def _on_decode(self, event: PrefillEvent | DecodeEvent | PdserveError) -> tuple[Token, ...]:
        match event:
            case Accepted():
                self._has_accepted = True
                return self._emit(self._first)
            case KvComplete():
                self._timeline.transfer = event
                self._kv_deadline = None
                self._close_prefill()
            case Tokens(tokens, timings):
                if timings is not None:
                    self._timeline.decode = self._timeline.decode or timings
                    self._timeline.prefill = self._timeline.prefill or timings.prefill
                return self._emit(tokens)
            case PdserveError():
                self._note_failure(self._decode, event)
                if not self._can_pull_again(event):
                    raise event
                assert self._decode is not None
                self._avoid.add(identity(self._decode.worker))
                self._decode.close()
                logger.info("%s: opening decode again: %s", self._request.request_id, event.message)
                self._open_decode()
        return ()

    def _open_decode(self) -> None:
        """Raises `Unavailable` when no decode worker can take it."""
        workers = self._fleet.ready("decode", "both")
        worker = pick_decode(workers, self._prefill_worker, self._avoid)
        if worker is None:
            why = "none has the model and KV layout of the prefill worker" if workers else "none is ready"
            raise Unavailable(Reason.NO_WORKER, f"no decode worker: {why}; start one, or retry when it is up")
        self._timeline.decode_worker = worker.worker_id
        self._has_accepted = False
        self._decode = _Call(worker, worker.client.decode(self._request, self._handoff, self._num_pulls), self._queue)
        self._num_pulls += 1

    def _can_pull_again(self, error: PdserveError) -> bool:
        """Whether the hand-off may still be there for a higher attempt. Once Decode has the KV, it isn't."""
        prefill = self._prefill
        if isinstance(error, Refused) or prefill is None or prefill.is_closed or self._num_pulls >= MAX_PULLS:
            return False
        return self._fleet.is_known(prefill.worker)

    def _note_failure(self, call: _Call | None, error: PdserveError) -> None:
        """A worker whose call broke is not asked again, by anyone until it beats, by this request at all."""
        if call is not None and error.reason in (Reason.LOST_PEER, Reason.INTERNAL, Reason.DRAINING, Reason.BUSY):
            self._avoid.add(identity(call.worker))
            call.worker.is_suspect |= error.reason is Reason.LOST_PEER

    def _close_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill.close()

    def _emit(self, tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        """Those of `tokens` that the client does not have. Two sources of one token are harmless."""
        next_index = len(self._emitted)
        for token in tokens:
            if token.index < next_index and token.token_id != self._emitted[token.index].token_id:
                self._timeline.num_mismatches += 1
                logger.error(
                    "%s: token %d came as %d and again as %d; the first stands",
                    self._request.request_id,
                    token.index,
                    self._emitted[token.index].token_id,
                    token.token_id,
                )
        fresh = tuple(token for token in tokens if token.index >= next_index)
        if fresh and fresh[0].index != next_index:
            raise Unavailable(Reason.INTERNAL, f"token {fresh[0].index} came before token {next_index}")
        return fresh
