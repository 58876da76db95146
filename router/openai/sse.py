"""Server-sent events: how a streamed reply is written, and what its chunks look like."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from router.openai.limits import HttpLimits
from router.scope import ClientGone

DONE = "data: [DONE]\n\n"
_SMALL_NBYTES = 32 << 10  # into an empty buffer, less than what makes a transport pause (64 KiB)

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events
}


class EventStream:
    """The reply's body. At most about 128 KiB wait for a slow reader: then `send` waits with them."""

    def __init__(self, http: web.Request, limits: HttpLimits) -> None:
        self._http = http
        self._stalled_client_s = limits.stalled_client_s
        self.response = web.StreamResponse(headers=_HEADERS)

    async def open(self) -> None:
        """Send the status and the headers."""
        try:
            await self.response.prepare(self._http)
        except ConnectionError as error:
            raise ClientGone("the client has left") from error

    async def send(self, events: str) -> None:
        """Raises `ClientGone` when the client has left, or has taken nothing for the stall limit."""
        transport = self._http.transport
        if transport is None:
            raise ClientGone("the client has left")
        data = events.encode("ascii")
        try:
            if len(data) <= _SMALL_NBYTES and transport.get_write_buffer_size() == 0:  # the usual case; it can't wait
                await self.response.write(data)
                return
            async with asyncio.timeout(self._stalled_client_s):
                await self.response.write(data)
        except ConnectionError as error:
            raise ClientGone("the client has left") from error
        except TimeoutError as error:
            transport.abort()  # a close would wait for the reader, too
            raise ClientGone(f"the client has taken nothing for {self._stalled_client_s:g} s") from error


class Chunks:
    """The events of one reply; all but the text is made once.

    JSON is written in ASCII: no character can be split on its way, and none can be taken for a line
    break (some readers end a line at U+2028).
    """

    def __init__(self, identity: Mapping[str, Any], include_usage: bool) -> None:
        self._identity = json.dumps(identity)[:-1]
        self._head = f'data: {self._identity}, "choices": [{{"index": 0, '
        self._tail = '}], "usage": null}\n\n' if include_usage else "}]}\n\n"

    def choice(self, members: str) -> str:
        """A chunk of the one choice; `members` is JSON without its braces."""
        return f"{self._head}{members}{self._tail}"

    def usage(self, usage: Mapping[str, Any]) -> str:
        """The chunk that ends a stream whose reader asked for the usage."""
        return f'data: {self._identity}, "choices": [], "usage": {json.dumps(usage)}}}\n\n'


def failure_event(body: Mapping[str, Any]) -> str:
    """What ends a stream that failed; no [DONE] follows."""
    return f"data: {json.dumps(body)}\n\n"
