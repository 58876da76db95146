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
