"""A client of a running server, for the command line, the launcher and the demo.

Use it so:

    async with Client("http://127.0.0.1:8000") as client:
        async with client.chat([{"role": "user", "content": "Hello"}], AskOptions()) as reply:
            async for text in reply:
                print(text, end="")
        timeline = await client.timeline(reply.request_id)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp

from pdserve.config import AskOptions
from pdserve.errors import ClientError, NoServer
from pdserve_wire.auth import TOKEN_HEADER
from pdserve_wire.deadlines import DEADLINES

_CONNECT_TIMEOUT_S = 5.0
_BROKEN = "the stream broke off; the answer is not whole"
_QUICK = aiohttp.ClientTimeout(total=10.0)


class ChatReply:
    """A reply while it streams; iterate once for its text."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.request_id: str = response.headers.get("x-request-id", "")
        self.finish_reason: str | None = None

    async def __aiter__(self) -> AsyncIterator[str]:
        """Raises `ClientError` where the server reports a failure, or the stream breaks off."""
        is_done = False
        try:
            async for line in self._response.content:  # up to the end: only then is the timeline there
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    is_done = True
                elif line.startswith(b"data:") and not is_done:
                    for choice in _event(data).get("choices", ()):
                        self.finish_reason = choice.get("finish_reason") or self.finish_reason
                        if text := choice.get("delta", {}).get("content"):
                            yield text
        except (aiohttp.ClientPayloadError, ConnectionError) as error:
            raise ClientError(_BROKEN) from error
        if not is_done:
            raise ClientError(_BROKEN)


class Client:
    """One server. `api_key` is for clients, `cluster_token` for operators on other machines."""

    def __init__(self, url: str, api_key: str | None = None, cluster_token: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers: dict[str, str] = {}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        if cluster_token:
            self._headers[TOKEN_HEADER] = cluster_token

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=DEADLINES.request_s, connect=_CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def chat(
        self, messages: Sequence[Mapping[str, str]], ask: AskOptions, model: str | None = None
    ) -> AsyncIterator[ChatReply]:
        """Send the messages; leaving the block before the reply's end aborts it. The server's own model by default."""
        body: dict[str, Any] = {
            "model": model or await self.model(),
            "messages": list(messages),
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "stream": True,
        }
        if ask.seed is not None:
            body["seed"] = ask.seed
        with _translated(self._url):
            async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
                await _check(response)
                yield ChatReply(response)

    async def model(self) -> str:
        """The name of the model that is served."""
        models = await self._get("/v1/models")
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ClientError(f"{self._url}/v1/models names no model; is this a pdserve server?") from error

    async def status(self) -> dict[str, Any]:
        """The router and its workers, as `/debug/status` has them."""
        return await self._get("/debug/status")

    async def timeline(self, request_id: str) -> dict[str, Any]:
        """Where the time of an ended request went."""
        return await self._get(f"/debug/timeline/{request_id}")

    async def _get(self, path: str) -> dict[str, Any]:
        with _translated(self._url):
            async with self._session.get(f"{self._url}{path}", timeout=_QUICK) as response:
                await _check(response)
                answer = await response.json(content_type=None)
        if not isinstance(answer, dict):
            raise ClientError(f"{self._url}{path}: not an answer of a pdserve server")
        return answer


class _translated:
    """aiohttp's errors as ours."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        match error:
            case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
                raise NoServer(f"{self._url}: no server answers there; start one with 'pdserve serve'") from error
            case aiohttp.InvalidURL():
                raise ClientError(f"{self._url}: not a URL; give one such as http://127.0.0.1:8000") from error
            case asyncio.TimeoutError():
                raise ClientError(f"{self._url}: the server took too long to answer") from error
            case aiohttp.ClientError() | ConnectionError():
                raise ClientError(f"{self._url}: {str(error) or type(error).__name__}") from error
            case json.JSONDecodeError() | UnicodeDecodeError():
                raise ClientError(f"{self._url}: the answer is no JSON; is this a pdserve server?") from error


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raise what a status other than 200 says."""
    if response.status == 200:
        return
    text = await response.text(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        body = {}
    raise ClientError(f"{_failure(body) or text.strip() or response.reason} (status {response.status})")


def _event(data: bytes) -> dict[str, Any]:
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ClientError("an event that is no JSON object; is this an OpenAI server?")
    if failure := _failure(event):
        raise ClientError(failure)
    return event


def _failure(body: Any) -> str:
    """OpenAI's form of an error, or a plain one."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return str(error) if error else ""
