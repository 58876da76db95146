"""A client of any OpenAI server that streams: what to send, and how the answer's bytes are taken."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import aiohttp

from benchmarks.reply import Reply, read_reply
from benchmarks.sse import Read

APIS = ("completions", "chat")


class NoServer(Exception):
    """The server can't be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request wants beside its prompt."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and which optional fields it takes."""

    url: str
    model: str
    api: str = "completions"
    takes_ignore_eos: bool = True
    takes_include_usage: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.api == "chat" else "/v1/completions"

    def body(self, prompt: str, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "stream": True,
        }
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if ask.top_p != 1:
            body["top_p"] = ask.top_p
        if self.takes_ignore_eos:
            body["ignore_eos"] = True
        if self.takes_include_usage:
            body["stream_options"] = {"include_usage": True}
        return body


@dataclass(frozen=True, slots=True)
class RawReply:
    """A reply's bytes as they came; they are read when the round is over."""

    sent_at: float
    ended_at: float
    reads: list[Read]
    error: str = ""

    def read(self) -> Reply:
        if self.error:
            return Reply(self.sent_at, self.ended_at, error=self.error)
        return read_reply(self.reads, self.sent_at, self.ended_at)


class Client:
    """Requests to one server, any number at a time."""

    def __init__(self, target: Target, timeout_s: float = 900.0, api_key: str | None = None) -> None:
        self.target = target
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers: Mapping[str, str] = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> Self:
        # A fresh connection each time: none fails because the server had just closed it as idle.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            self.target.url, connector=connector, timeout=self._timeout, headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, prompt: str, ask: Ask) -> RawReply:
        """Send one request and take what comes. A failure is the reply's error."""
        body = self.target.body(prompt, ask)
        reads: list[Read] = []
        clock, error = time.monotonic, ""
        sent_at = clock()
        try:
            async with self._session.post(self.target.path, json=body) as response:
                if response.status == 200:
                    async for data in response.content.iter_any():
                        reads.append((clock(), data))
                else:
                    error = f"HTTP {response.status}: {(await response.text())[:200]}"
        except TimeoutError:
            error = f"no end after {self._timeout.total:g} s"
        except aiohttp.ClientError as failure:
            error = f"{type(failure).__name__}: {failure}"
        return RawReply(sent_at, clock(), reads, error)

    async def find_model(self) -> str:
        """The first model that the server lists. Raises `NoServer`."""
        try:
            async with self._session.get("/v1/models") as response:
                listed = await response.json()
                return str(listed["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise NoServer(f"{self.target.url}/v1/models: {error!r}; give --model") from error

    async def probe(self, prompt: str) -> Reply:
        """Find out which optional fields the server takes, and keep to them. Raises `NoServer`."""
        first = await self._probe(prompt)
        for ignore_eos, include_usage in ((False, True), (True, False), (False, False)):
            if not first.error.startswith("HTTP 4"):
                break
            self.target = replace(self.target, takes_ignore_eos=ignore_eos, takes_include_usage=include_usage)
            reply = await self._probe(prompt)
            if not reply.error:
                return reply
        if first.error:
            raise NoServer(f"{self.target.url}{self.target.path}: {first.error}")
        return first

    async def _probe(self, prompt: str) -> Reply:
        return (await self.ask(prompt, Ask(max_tokens=4))).read()
