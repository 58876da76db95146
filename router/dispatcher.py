"""The whole story of a request, in one place: only the dispatcher knows what the client has.

It runs one `Attempt` after another. What the client already has becomes part of the next attempt's
prompt, so a stream whose worker died goes on from its next token.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from pdserve_wire.errors import Reason, Unavailable
from pdserve_wire.messages import Token, WorkerRequest
from pdserve_wire.timeline import RequestTimeline
from router.attempt import Attempt
from router.fleet import Fleet, Worker
from router.generation import GenerationRequest
from router.policy import Identity, are_tried, pick_prefill

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    max_requests: int = 512  # in flight at once; the next one is answered 429
    max_attempts: int = 4  # a request is built so often
    no_prefill_policy: str = "local"  # local: decode prefills by itself; refuse: 503


class Dispatcher:
    """`Generator` over the fleet of one router. Lives on the event loop."""

    def __init__(self, fleet: Fleet, options: DispatchOptions) -> None:
        self.is_draining = False
        self.num_in_flight = 0
        self._fleet = fleet
        self._options = options
        self._idle = asyncio.Event()
        self._idle.set()

    async def generate(
        self, request: GenerationRequest, timeline: RequestTimeline
    ) -> AsyncGenerator[tuple[Token, ...], None]:
        if self.is_draining:
            raise Unavailable(Reason.DRAINING, "this router is shutting down; retry elsewhere")
        if self.num_in_flight >= self._options.max_requests:
            raise Unavailable(Reason.BUSY, f"{self.num_in_flight} requests are in flight already; retry later")
        self.num_in_flight += 1
        self._idle.clear()
        try:
            async with aclosing(self._attempts(request, timeline)) as attempts:
                async for tokens in attempts:
                    yield tokens
        finally:
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Until no request is in flight."""
        await self._idle.wait()

    async def _attempts(
        self, request: GenerationRequest, timeline: RequestTimeline
    ) -> AsyncGenerator[tuple[Token, ...], None]:
        emitted: list[Token] = []
        avoid: set[Identity] = set()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.timeout_s
        for generation in range(self._options.max_attempts):
            if deadline <= loop.time():
                raise Unavailable(Reason.NO_ROOM, f"the request was not finished within {request.timeout_s:g} s")
            prefill = self._pick_prefill(request.model, avoid)
            worker_request = self._worker_request(request, emitted, generation, deadline - loop.time())
            attempt = Attempt(self._fleet, worker_request, emitted, timeline, avoid, prefill)
            try:
                async with aclosing(attempt.run(deadline)) as batches:
                    async for tokens in batches:
                        emitted += tokens
                        timeline.token_times += [time.monotonic()] * len(tokens)
                        yield tokens
                        if tokens[-1].finish_reason is not None:
                            return
            except Unavailable as error:
                is_last = generation + 1 == self._options.max_attempts
                if is_last or error.reason is Reason.NO_ROOM or (not emitted and self._is_overloaded(error, avoid)):
                    raise
                timeline.resume_reasons.append(error.reason)
                logger.warning(
                    "%s: built again after %d tokens: %s: %s", request.request_id, len(emitted), error.reason, error
                )
            if generation:
                backoff_s = _FIRST_BACKOFF_S * 2**generation * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(backoff_s, max(0.0, deadline - loop.time())))

    def _pick_prefill(self, model: str, avoid: set[Identity]) -> Worker | None:
        """One that a decode worker can take KV from, or `None`: decode prefills by itself.

        Raises `Unavailable` where nobody can serve the request now, so that nothing is opened in vain.
        """
        decode = self._fleet.ready("decode", "both", model=model)
        if not decode:
            raise Unavailable(Reason.NO_WORKER, "no decode worker is ready; start one, or retry when it is up")
        prefill = self._fleet.ready("prefill", model=model)
        worker = pick_prefill(prefill, decode, avoid)
        is_local = worker is None and not self._fleet.ready("both", model=model)
        if is_local and self._options.no_prefill_policy == "refuse":
            why = "none has the model and KV layout of a decode worker" if prefill else "none is ready"
            raise Unavailable(Reason.NO_WORKER, f"no prefill worker: {why}; start one, or retry when it is up")
        return worker

    def _is_overloaded(self, error: Unavailable, avoid: set[Identity]) -> bool:
        """Every worker of a pool has been asked and is busy: to build again at once would only add to that."""
        pools = (self._fleet.ready("prefill"), self._fleet.ready("decode", "both"))
        return error.reason is Reason.BUSY and any(pool and are_tried(pool, avoid) for pool in pools)

    def _worker_request(
        self, request: GenerationRequest, emitted: list[Token], generation: int, timeout_s: float
    ) -> WorkerRequest:
        return WorkerRequest(
            request_id=request.request_id,
            router_id=self._fleet.router_id,
            token_ids=(*request.token_ids, *(token.token_id for token in emitted)),
            num_prompt_tokens=len(request.token_ids),
            num_emitted_tokens=len(emitted),
            sampling=request.sampling,
            generation=generation,
            timeout_s=timeout_s,
            priority=request.priority,
            model=request.model,
        )
