"""One client request from its arrival to its end, and the one place where the end is counted."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from pdserve_wire.errors import Reason, Refused, Unavailable
from pdserve_wire.timeline import RequestTimeline
from router.intake import Prepared, RequestError
from router.metrics import RouterMetrics
from router.timelines import Timelines


class ClientGone(ConnectionError):
    """The client has left, or takes nothing any more: nobody is there to be told."""


class RequestScope:
    """`with` it, from arrival to end: whatever leaves the block, the request is counted once.

    An exception that leaves it decides the outcome, unless one is set: `rejected` for what the
    client can change or try again later (4xx), `abort` when the client has left, `error` otherwise.
    """

    def __init__(self, metrics: RouterMetrics, timelines: Timelines, request_id: str, client_id: str = "") -> None:
        self.timeline = RequestTimeline(request_id)
        self.is_stream = False
        self._metrics = metrics
        self._timelines = timelines
        self._client_id = client_id
        self.public_id = client_id or request_id  # what `x-request-id` says
        self._first_byte_at: float | None = None

    def __enter__(self) -> RequestScope:
        self._metrics.arrived()
        return self

    def prepared(self, prepared: Prepared) -> None:
        """The prompt is token ids now."""
        self.timeline.tokenized_at = time.monotonic()
        self.timeline.num_prompt_tokens = len(prepared.request.token_ids)

    def first_byte(self) -> None:
        """The body's first byte goes out."""
        if self._first_byte_at is None:
            self._first_byte_at = time.monotonic()

    def end(self, outcome: str) -> None:
        """Name the outcome; the first one named stays."""
        self.timeline.outcome = self.timeline.outcome or outcome

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # without an outcome or an exception, the handler has forgotten the client
        self.end("error" if error is None else _outcome_of(error))
        self.timeline.ended_at = time.monotonic()
        self._metrics.observe(self.timeline, self.is_stream, self._first_byte_at)
        self._timelines.add(self.timeline, self._client_id)


def _outcome_of(error: BaseException) -> str:
    if isinstance(error, RequestError | Refused):
        return "rejected"
    if isinstance(error, Unavailable):
        return "rejected" if error.reason is Reason.BUSY else "error"
    if isinstance(error, asyncio.CancelledError | GeneratorExit | ClientGone):
        return "abort"
    return "error"
