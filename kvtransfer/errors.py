"""Why blocks did not move.

    TransferError            an error of our own making; the base of all others
      +- RefusedError        the other side won't serve this pull: field and reason say why
      +- PeerLostError       the connection was closed, reset, or could not be made
      +- PeerSilentError     a deadline passed without a sign of life
      +- ChecksumError       bytes arrived that are not the bytes that were sent
      +- ProtocolError       the other side sent something that is no frame of ours
      +- AbortedError        either side gave the pull up on purpose

`label` is one word of a fixed set, fit for a metric. `reason` is the same word, except that a
refusal's is the one that the refusing side gave ("unknown", "mismatch", ...).
"""

from __future__ import annotations

from typing import ClassVar


class TransferError(Exception):
    """A pull failed; what has arrived of it must not be used."""

    label: ClassVar[str] = "internal"

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.label)
        self.reason = self.label

    def forget_frames(self) -> None:
        """Drop the traceback, whose frames hold views of blocks, before the error outlives its thread."""
        self.__traceback__ = self.__context__ = self.__cause__ = None


class RefusedError(TransferError):
    """The pull can't be served as asked. No byte of KV has moved."""

    label: ClassVar[str] = "refused"

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class PeerLostError(TransferError):
    """The peer is gone: closed, reset or unreachable."""

    label: ClassVar[str] = "peer_lost"


class PeerSilentError(TransferError):
    """The peer may be there, but nothing came (or could be sent) before the deadline."""

    label: ClassVar[str] = "peer_silent"


class ChecksumError(TransferError):
    """A frame's bytes differ from its checksum."""

    label: ClassVar[str] = "checksum"


class ProtocolError(TransferError):
    """A malformed frame, one that is too large, or one that has no place here."""

    label: ClassVar[str] = "protocol"


class AbortedError(TransferError):
    """The pull was given up, here or (FAIL) by the prefill that was to fill it."""

    label: ClassVar[str] = "aborted"
