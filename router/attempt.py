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
from router.policy import Identity, identity, pick, pick_decode
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
        end: PdserveError = Unavailable(Reason.LOST_PEER, "the worker ended the call too early")
        try:
            async for event in self._stream:
                self._queue.put_nowait((self, event))
        except PdserveError as error:
            end = error
        except Exception as error:
            logger.exception("a worker's stream can't be read")
            end = Unavailable(Reason.INTERNAL, f"the worker's stream can't be read: {error}")
        finally:
            self._queue.put_nowait((self, end))  # whatever ends the reading, the attempt hears of it


# An error without a call is an alarm: a wait has lasted too long.
_Queue = asyncio.Queue[tuple[_Call | None, PrefillEvent | DecodeEvent | PdserveError]]


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
        avoid: set[Identity],
        prefill_worker: Worker | None,
    ) -> None:
        self._fleet = fleet
        self._request = request
        self._emitted = emitted
        self._timeline = timeline
        self._avoid = avoid
        self._prefill_worker = prefill_worker
        self._queue: _Queue = asyncio.Queue()
        self._alarms: list[asyncio.TimerHandle] = []
        self._prefill: _Call | None = None
        self._decode: _Call | None = None
        self._handoff: KvHandoff | None = None
        self._num_pulls = 0
        self._first: tuple[Token, ...] = ()  # made by prefill; emitted when decode has accepted
        self._has_accepted = False
        self._has_kv = False  # decode has all of it: nothing that comes from prefill matters

    async def run(self, deadline: float) -> AsyncGenerator[tuple[Token, ...], None]:
        """Tokens until one has a finish_reason. Raises `Refused`, or `Unavailable` when this attempt has
        failed or the event loop's `deadline` passes. Closing the iterator closes both calls.
        """
        self._set_alarm(deadline, Reason.NO_ROOM, "the request's deadline passed before it was finished")
        try:
            self._open()
            while True:
                call, event = await self._queue.get()
                if call is None:
                    tokens = self._on_alarm(event)
                elif call is self._decode:
                    tokens = self._on_decode(call, event)
                elif call is self._prefill:
                    tokens = self._on_prefill(call, event)
                else:
                    continue  # of a decode worker that was given up
                if tokens:
                    yield tokens
                    if tokens[-1].finish_reason is not None:
                        return
        finally:
            for alarm in self._alarms:
                alarm.cancel()
            for open_call in (self._prefill, self._decode):
                if open_call is not None:
                    open_call.close()

    def _open(self) -> None:
        if self._timeline.admitted_at is None:
            self._timeline.admitted_at = time.monotonic()
        worker = self._prefill_worker
        if worker is None:
            self._timeline.decision = self._timeline.decision or "local"
            self._open_decode()
        else:
            self._timeline.decision = self._timeline.decision or "remote"
            self._timeline.prefill_worker = worker.worker_id
            self._prefill = _Call(worker, worker.client.prefill(self._request), self._queue)

    def _set_alarm(self, when: float, reason: Reason, message: str) -> None:
        """At `when` by the event loop's clock, the attempt fails by this, unless it is over."""
        loop = asyncio.get_running_loop()
        alarm = loop.call_at(when, self._queue.put_nowait, (None, Unavailable(reason, message)))
        self._alarms.append(alarm)

    def _on_alarm(self, event: PrefillEvent | DecodeEvent | PdserveError) -> tuple[Token, ...]:
        assert isinstance(event, PdserveError)
        if event.reason is Reason.KV_LOST and self._has_kv:
            return ()
        raise event

    def _on_prefill(self, call: _Call, event: PrefillEvent | DecodeEvent | PdserveError) -> tuple[Token, ...]:
        match event:
            case Started(handoff) if self._handoff is None:
                self._handoff = handoff
                if self._request.sampling.max_tokens - self._request.num_emitted_tokens > 1:
                    self._open_decode()
            case First(tokens, timings) if tokens:
                self._timeline.prefill = self._timeline.prefill or timings
                self._first = tokens
                if self._has_accepted or tokens[-1].finish_reason is not None:
                    return self._emit(call, tokens)
            case PdserveError() if not call.is_closed:
                self._note_failure(call, event)
                if self._decode is None:
                    raise event
                call.close()
                by = asyncio.get_running_loop().time() + DEADLINES.peer_timeout_s + DEADLINES.open_s
                self._set_alarm(by, Reason.KV_LOST, "prefill is gone and decode has not said whether it has the KV")
        return ()

    def _on_decode(self, call: _Call, event: PrefillEvent | DecodeEvent | PdserveError) -> tuple[Token, ...]:
        match event:
            case Tokens(tokens, timings):
                if timings is not None:
                    self._timeline.decode = self._timeline.decode or timings
                    self._timeline.prefill = self._timeline.prefill or timings.prefill
                return self._emit(call, tokens)
            case Accepted():
                self._has_accepted = True
                return self._emit(call, self._first)
            case KvComplete():
                self._timeline.transfer = event
                self._has_kv = True
                if self._prefill is not None:
                    self._prefill.close()
            case PdserveError():
                self._note_failure(call, event)
                if not self._can_pull_again(event):
                    raise event
                call.close()
                logger.info("%s: opening decode again: %s", self._request.request_id, event.message)
                self._open_decode()
        return ()

    def _open_decode(self) -> None:
        """Raises `Unavailable` when no decode worker can take it."""
        worker = self._pick_decode()
        if worker is None:
            why = "none has the model and KV layout of the prefill worker, or none is ready"
            raise Unavailable(Reason.NO_WORKER, f"no decode worker: {why}; start one, or retry when it is up")
        self._timeline.decode_worker = worker.worker_id
        self._has_accepted = False
        self._decode = _Call(worker, worker.client.decode(self._request, self._handoff, self._num_pulls), self._queue)
        self._num_pulls += 1

    def _pick_decode(self) -> Worker | None:
        if self._prefill_worker is not None:
            return pick_decode(self._fleet.ready("decode", "both"), self._prefill_worker, self._avoid)
        # whole requests are what `both` is for; a decode worker takes them where there is none
        model = self._request.model
        workers = self._fleet.ready("both", model=model) or self._fleet.ready("decode", model=model)
        return pick(workers, self._avoid)

    def _can_pull_again(self, error: PdserveError) -> bool:
        """Whether the hand-off may still be there for a higher attempt. Once Decode has the KV, it isn't."""
        prefill = self._prefill
        if isinstance(error, Refused) or prefill is None or prefill.is_closed or self._num_pulls >= MAX_PULLS:
            return False
        if error.reason in (Reason.BUSY, Reason.DRAINING):
            another = self._pick_decode()
            if another is None or identity(another) in self._avoid:
                return False  # to ask the same one again at once is no use
        return self._fleet.is_known(prefill.worker)

    def _note_failure(self, call: _Call, error: PdserveError) -> None:
        """A worker whose call broke is not asked again, by anyone until it beats, by this request at all."""
        if error.reason is not Reason.REFUSED:
            self._avoid.add(identity(call.worker))
            call.worker.is_suspect |= error.reason is Reason.LOST_PEER
        if error.reason is Reason.KV_LOST and self._prefill_worker is not None:
            self._avoid.add(identity(self._prefill_worker))  # either side may be at fault

    def _emit(self, call: _Call, tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        """Those of `tokens` that the client does not have. Two sources of one token are harmless."""
        fresh: list[Token] = []
        next_index = len(self._emitted)
        for token in tokens:
            if token.index == next_index + len(fresh):
                fresh.append(token)
                if token.finish_reason is not None:
                    break
            elif token.index < next_index + len(fresh):
                self._compare([*self._emitted, *fresh][token.index], token)
            else:
                late = next_index + len(fresh)
                error = Unavailable(Reason.INTERNAL, f"token {token.index} came before token {late}")
                self._note_failure(call, error)
                raise error
        return tuple(fresh)

    def _compare(self, first: Token, again: Token) -> None:
        if again.token_id != first.token_id:
            self._timeline.num_mismatches += 1
            logger.error(
                "%s: token %d came as %d and again as %d; the first stands",
                self._request.request_id,
                first.index,
                first.token_id,
                again.token_id,
            )
