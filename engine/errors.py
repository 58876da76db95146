"""Why the engine says no.

Everything that it raises on purpose is an `EngineError`:

    ModelRefused     the model would be served wrongly; the message names the part
    RequestRefused   this request can never run here; the message says what to change
    SequenceFailed   a sequence that was accepted can't go on
      +- StepFailed     the step that computed it raised; the engine itself goes on
      +- NoRoom         so many blocks are quarantined that the pool can't hold it any more
      +- EngineStopped  the engine stopped before it was finished
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all that the engine raises on purpose."""


class ModelRefused(EngineError):
    """The model's architecture or configuration can't be served correctly."""


class RequestRefused(EngineError):
    """The request can't be served by this engine, now or later."""


class SequenceFailed(EngineError):
    """An accepted sequence ends without a finish reason. Another engine may still serve it."""


class StepFailed(SequenceFailed):
    """The model raised while it computed this sequence."""


class NoRoom(SequenceFailed):
    """What is left of the pool can't hold this sequence."""


class EngineStopped(SequenceFailed):
    """The engine has stopped, or is stopping."""
