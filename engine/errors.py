"""Why the engine says no.

    EngineError
      +- ModelRefused     the model would be served wrongly; the message names the part
      +- RequestRefused   this request can never run here; the message says what to change
      +- StepFailed       the step that computed a sequence raised; the engine itself goes on
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all that the engine raises on purpose."""


class ModelRefused(EngineError):
    """The model's architecture or configuration can't be served correctly."""


class RequestRefused(EngineError):
    """The request can't be served by this engine, now or later."""


class StepFailed(EngineError):
    """The model raised while it computed this sequence."""
