"""What a client can take of the HTTP front."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    max_body_nbytes: int = 10 << 20
    body_timeout_s: float = 60.0  # the whole body must be here
    stalled_client_s: float = 60.0  # a stream whose reader takes nothing is aborted
    shutdown_s: float = 30.0  # running requests may end
