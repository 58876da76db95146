"""The cluster token: every call between router and workers carries it, or is refused.

A token is one line in a file that only its owner can read. It is compared in constant time and
never logged.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

TOKEN_HEADER = "x-pdserve-cluster-token"
MIN_TOKEN_LENGTH = 16


class BadTokenFile(ValueError):
    """The cluster-token file can't be used; the message says what to change."""


def make_token_file(path: Path) -> None:
    """Write a fresh token, readable by its owner only. An existing file is kept.

    The file appears whole or not at all, so a process that starts at the same time reads a token.
    Raises `BadTokenFile` when it can't be written.
    """
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            os.link(draft, path)
        finally:
            draft.unlink()
    except FileExistsError:
        return  # another process was first
    except OSError as error:
        raise BadTokenFile(f"--cluster-token-file {path}: can't be written: {error.strerror}") from error


def read_token(path: Path) -> str:
    """Raises `BadTokenFile` when it can't be read or isn't one line that is long enough to be a secret."""
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        advice = "make one with 'pdserve token FILE'"
        raise BadTokenFile(f"--cluster-token-file {path}: {error.strerror}; {advice}") from error
    if len(token) < MIN_TOKEN_LENGTH or not all(0x21 <= byte <= 0x7E for byte in token):
        wanted = f"one ASCII line of at least {MIN_TOKEN_LENGTH} characters, without spaces"
        raise BadTokenFile(f"--cluster-token-file {path}: needs {wanted}")
    return token.decode()


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The call metadata that `TokenInterceptor` accepts."""
    return ((TOKEN_HEADER, token),)


def is_token(given: str | bytes, token: str) -> bool:
    given_bytes = given.encode() if isinstance(given, str) else given
    return hmac.compare_digest(given_bytes, token.encode())


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses every call that does not carry the cluster token, before a handler sees it."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        given = next((value for key, value in details.invocation_metadata or () if key == TOKEN_HEADER), "")
        if is_token(given, self._token):
            return await continuation(details)
        handler = await continuation(details)
        return None if handler is None else _refuse_like(handler)


def _refuse_like(handler: Any) -> Any:
    """A handler of the same kind that answers UNAUTHENTICATED."""
    message = "this port is for members of the cluster: the cluster token is missing or wrong"

    async def refuse(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    async def refuse_stream(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
        yield  # makes this an async generator

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)
