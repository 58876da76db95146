"""A server of the OpenAI form whose every byte and pause a test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from benchmarks.client import Ask
from benchmarks.reply import Reply
from benchmarks.round import CpuTime, Round, summarize
from benchmarks.workload import Workload

Script = Sequence[bytes | float]  # what is written, and for how long nothing is
Answer = Callable[[Mapping[str, Any]], Script | web.Response]


def chunk(text: str, finish_reason: str | None = None, **more: Any) -> bytes:
    """A completion chunk as an event."""
    body = {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], **more}
    return f"data: {json.dumps(body)}\n\n".encode()


def chat_chunk(delta: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': finish_reason}]})}\n\n".encode()


def usage_chunk(num_tokens: int, num_prompt_tokens: int = 75) -> bytes:
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}
    return f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()


DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def openai_server(answer: Answer) -> AsyncIterator[str]:
    """Its URL. `answer` is asked for each request; a script that ends without `DONE` ends the connection."""

    async def complete(request: web.Request) -> web.StreamResponse:
        script = answer(await request.json())
        if isinstance(script, web.Response):
            return script
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for step in script:
            if isinstance(step, bytes):
                await response.write(step)
            else:
                await asyncio.sleep(step)  # the pause is what the test measures
        if script[-1] != DONE:
            assert request.transport is not None
            request.transport.close()
        return response

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def make_reply(*token_times: float, **more: Any) -> Reply:
    """A whole reply to a request sent at 0."""
    fields = {"ended_at": token_times[-1] if token_times else 0.0, "num_chunks": len(token_times)}
    return Reply(sent_at=0.0, token_times=token_times, **{**fields, "num_tokens": len(token_times), **more})


def make_round(*replies: Reply, duration_s: float = 1.0) -> Round:
    return summarize(replies, duration_s, CpuTime(client_s=0.01, server_s=1.5, others_s=0.0, steal_s=0.0))


def make_workload(name: str = "1", **more: Any) -> Workload:
    return Workload(**{"name": name, "num_streams": 1, "num_requests": 2, "prompt_tokens": 20, "ask": Ask(4), **more})
