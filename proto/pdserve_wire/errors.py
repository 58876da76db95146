"""Why a call between router and worker failed, and its gRPC form.

    PdserveError
      +- Refused       the request can never be served as it is (400 for the client)
      +- Unavailable   not here, not now: another worker, or later
           KV_LOST     the hand-off is gone or its transfer broke
           DRAINING    the worker takes nothing new
           NO_ROOM     nothing can be admitted before the deadline
           BUSY        the waiting queue is at its bound
           ABORTED     the caller left, or its lease ended
           NO_WORKER   the pool has no worker that can take it

A reason travels as the first word of the status details: "KV_LOST: peer closed". Details are cut at
`MAX_DETAILS_LENGTH`: gRPC drops a status whose trailers pass 8 KB, and the reason would go with it.
"""

from __future__ import annotations

from enum import StrEnum

import grpc

MAX_DETAILS_LENGTH = 1_000


class Reason(StrEnum):
    REFUSED = "REFUSED"
    KV_LOST = "KV_LOST"
    DRAINING = "DRAINING"
    NO_ROOM = "NO_ROOM"
    BUSY = "BUSY"
    ABORTED = "ABORTED"
    LOST_PEER = "LOST_PEER"  # the stream itself broke: the worker died, or can't be reached
    NO_WORKER = "NO_WORKER"
    INTERNAL = "INTERNAL"


class PdserveError(Exception):
    """A failure with a reason that another process can act on."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Refused(PdserveError):
    """The request can't be served as it is; the message says what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.REFUSED, message)


class Unavailable(PdserveError):
    """Not here and not now; the request itself is in order."""


_STATUS = {
    Reason.REFUSED: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.KV_LOST: grpc.StatusCode.DATA_LOSS,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.NO_ROOM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.ABORTED: grpc.StatusCode.CANCELLED,
    Reason.LOST_PEER: grpc.StatusCode.UNAVAILABLE,
    Reason.NO_WORKER: grpc.StatusCode.UNAVAILABLE,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


def to_status(error: PdserveError) -> tuple[grpc.StatusCode, str]:
    """The gRPC status and details that `from_status` reads back."""
    return _STATUS[error.reason], f"{error.reason}: {error.message}"[:MAX_DETAILS_LENGTH]


def from_status(code: grpc.StatusCode, details: str | None) -> PdserveError:
    """What a failed call means. A status that no worker of ours wrote is a lost peer."""
    word, _, message = (details or "").partition(": ")
    if word in Reason.__members__:
        reason = Reason(word)
        return Refused(message) if reason is Reason.REFUSED else Unavailable(reason, message)
    return Unavailable(Reason.LOST_PEER, f"{code.name}: {details or 'no details'}")
