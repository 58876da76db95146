"""Why a command can't do what was asked.

Beside these: `InvalidOption`, `ModelNotFound`, and what the floors below raise.

    LaunchFailed     `serve` can't start, or can't go on
    ClientError      a server can't be reached, or did not do what was asked
      +- NoServer    nobody answers there
"""

from __future__ import annotations


class LaunchFailed(RuntimeError):
    """The message says which part ended, with the end of its log."""


class ClientError(Exception):
    """The message says why."""


class NoServer(ClientError):
    """Nobody answers there."""


def known_errors() -> tuple[type[Exception], ...]:
    """Those, of all floors, whose message is all that a person needs."""
    from engine.errors import EngineError
    from engine.sampling import InvalidSampling
    from pdserve.models import ModelNotFound
    from pdserve_wire.auth import BadTokenFile
    from pdserve_wire.errors import PdserveError
    from router.intake import RequestError
    from router.text.errors import ModelFilesError

    below = (EngineError, InvalidSampling, BadTokenFile, PdserveError, RequestError, ModelFilesError)
    return (LaunchFailed, ClientError, ModelNotFound, *below, OSError)
