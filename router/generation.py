"""What the fronts (HTTP and gRPC) ask for, and of whom: the seam between text and workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from engine.sampling import SamplingParams
from pdserve_wire.messages import Token
from pdserve_wire.timeline import RequestTimeline


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request in token ids. `timeout_s` is the whole time that the client allows."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    model: str = ""
    timeout_s: float = 600.0
    priority: int = 0


class Generator(Protocol):
    """Turns a request into tokens. The dispatcher is the one in production."""

    def generate(
        self, request: GenerationRequest, timeline: RequestTimeline
    ) -> AsyncGenerator[tuple[Token, ...], None]:
        """Tokens in order, none lost and none twice, the last with its finish_reason.

        Closing the iterator (or cancelling the task that reads it) aborts the request. Raises
        `pdserve_wire.errors.Refused` where the request can never be served and `Unavailable` where
        it can't be now. Fills the timeline's admission, worker and token fields.
        """
        ...
