"""What every streaming call of a worker goes through: checks, its lease, its deadline, its status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from engine.sampling import InvalidSampling
from pdserve_pb import worker_pb2 as pb
from pdserve_wire.errors import PdserveError, Reason, Refused, Unavailable, to_status
from pdserve_wire.leases import Leases
from pdserve_wire.messages import MalformedMessage, WorkerRequest, request_from_pb

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Life = Callable[[WorkerRequest, Context], Awaitable[None]]


class Gate:
    """One worker's door. `max_calls` bounds the calls that it serves at once, queued ones included."""

    def __init__(self, leases: Leases, model: str, vocab_size: int, max_calls: int) -> None:
        self.is_draining = False
        self.leases = leases
        self._model = model
        self._vocab_size = vocab_size
        self._max_calls = max_calls

    async def serve(self, message: pb.WorkerRequest, live: Life, context: Context) -> None:
        """Run a request's life and turn its failure into a status.

        `live` is cancelled when the caller leaves, the lease ends or the deadline passes; it marks
        what it holds as free in its own `finally`, without waiting.
        """
        try:
            request = self._admit(message)
            with self.leases.lease(request.router_id):
                async with asyncio.timeout(request.timeout_s):
                    await live(request, context)
        except PdserveError as error:
            await context.abort(*to_status(error))
        except TimeoutError:
            late = Unavailable(Reason.NO_ROOM, "the request's deadline passed before it was finished")
            await context.abort(*to_status(late))
        except asyncio.CancelledError:
            if not self.leases.has_ended(asyncio.current_task()):
                raise
            ended = Unavailable(Reason.ABORTED, "this worker did not hear from the router, or is shutting down")
            await context.abort(*to_status(ended))  # else the caller would wait on: a cancelled handler says nothing
        except Exception as error:
            logger.exception("request %s failed", message.request_id)
            await context.abort(*to_status(Unavailable(Reason.INTERNAL, f"{type(error).__name__}: {error}")))

    def _admit(self, message: pb.WorkerRequest) -> WorkerRequest:
        try:
            request = request_from_pb(message)
            request.sampling.validate()
        except (MalformedMessage, InvalidSampling) as error:
            raise Refused(str(error)) from error
        if request.model and request.model != self._model:
            raise Refused(f"model: this worker serves {self._model}, not {request.model}")
        if max(request.token_ids) >= self._vocab_size:
            raise Refused(f"token_ids must be below the vocabulary's size {self._vocab_size}")
        outside = max([*request.sampling.logit_bias, *request.sampling.stop_token_ids], default=0)
        if outside >= self._vocab_size:
            raise Refused(f"logit_bias and stop_token_ids must name tokens below {self._vocab_size}")
        if request.adapter or request.cache_salt:
            raise Refused("adapter and cache_salt are not built yet; leave them out")
        if self.is_draining:
            raise Unavailable(Reason.DRAINING, "this worker finishes what it has and takes nothing new")
        if len(self.leases) >= self._max_calls:
            raise Unavailable(Reason.BUSY, f"{self._max_calls} requests are here already")
        return request
