"""A worker as the router calls it: dataclasses in, events out, failures as `PdserveError`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import grpc

from pdserve_pb import worker_pb2 as pb
from pdserve_pb import worker_pb2_grpc as pb_grpc
from pdserve_wire.auth import token_metadata
from pdserve_wire.channel import make_channel
from pdserve_wire.deadlines import DEADLINES
from pdserve_wire.errors import Reason, Unavailable, from_status
from pdserve_wire.messages import (
    DecodeEvent,
    KvHandoff,
    MalformedMessage,
    PrefillEvent,
    WorkerRequest,
    decode_event_from_pb,
    handoff_to_pb,
    prefill_event_from_pb,
    request_to_pb,
)

Event = TypeVar("Event")


class EventStream(Generic[Event]):
    """One open call. It is the request's lease on the worker: `close` gives it back."""

    def __init__(self, call: Any, from_pb: Callable[[Any], Event]) -> None:
        self._call = call
        self._from_pb = from_pb

    def close(self) -> None:
        """End the call now. Safe in any state, any number of times."""
        self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Events until the worker ends the call. Raises `PdserveError` when it failed."""
        with _translated():
            async for message in self._call:
                if message is None:  # gRPC's word for bytes that it could not parse
                    raise MalformedMessage("its bytes can't be parsed")
                yield self._from_pb(message)


class WorkerClient:
    """All calls of one router to one worker process, on one channel."""

    def __init__(self, address: str, token: str) -> None:
        self._channel = make_channel(address)
        self._metadata = token_metadata(token)
        self._prefill = pb_grpc.PrefillStub(self._channel)
        self._decode = pb_grpc.DecodeStub(self._channel)
        self._control = pb_grpc.ControlStub(self._channel)

    def prefill(self, request: WorkerRequest) -> EventStream[PrefillEvent]:
        """Raises `PdserveError` where the worker has left already."""
        with _translated():
            call = self._prefill.Prefill(request_to_pb(request), metadata=self._metadata)
        return EventStream(call, prefill_event_from_pb)

    def decode(self, request: WorkerRequest, handoff: KvHandoff | None, pull_attempt: int) -> EventStream[DecodeEvent]:
        """Without a hand-off the worker prefills by itself. Raises as `prefill` does."""
        message = pb.DecodeRequest(request=request_to_pb(request), pull_attempt=pull_attempt)
        if handoff is not None:
            message.handoff.CopyFrom(handoff_to_pb(handoff))
        with _translated():
            call = self._decode.Decode(message, metadata=self._metadata)
        return EventStream(call, decode_event_from_pb)

    async def ledger(self) -> str:
        """The worker's ledger as JSON. Raises `PdserveError`."""
        with _translated():
            call = self._control.Ledger(pb.LedgerRequest(), metadata=self._metadata, timeout=DEADLINES.open_s)
            response: pb.LedgerResponse = await call
        return response.json

    async def close(self) -> None:
        """Every call that is open ends as a lost peer."""
        await self._channel.close(None)


@contextmanager
def _translated() -> Iterator[None]:
    """The one place where what gRPC raises becomes ours: of all its ways to fail, none may pass as another."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_status(error.code(), error.details()) from error
    except grpc.aio.UsageError as error:  # the channel was closed before the call
        raise Unavailable(Reason.LOST_PEER, "the worker has left") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # nobody cancelled us: the channel was closed under the call
        raise Unavailable(Reason.LOST_PEER, "the worker has left") from error
    except MalformedMessage as error:
        raise Unavailable(Reason.INTERNAL, f"the worker sent no message of ours: {error}") from error
