"""The client reads streams as they come, and turns what goes wrong into one line."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from pdserve.ask import chat, status
from pdserve.client import Client
from pdserve.config import AskOptions, ChatOptions, StatusOptions
from pdserve.errors import ClientError, NoServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
HELLO = [{"role": "user", "content": "Hello"}]
DONE = "data: [DONE]\n\n"
TIMELINE = {"request_id": "r1", "phases_s": {"tokenize": 0.001}, "num_output_tokens": 2, "e2e_s": 0.5}
WORKER = {"worker_id": "decode-0", "role": "decode", "is_ready": True, "kv_blocks": {"free": 3}, "num_blocks": 3}
STATUS = {"router": {"model": "smol", "why_not_ready": None}, "workers": [WORKER]}


def chunk(text: str, finish_reason: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


class Server:
    """What a router looks like from outside. Keeps what it was asked."""

    def __init__(self, *events: str) -> None:
        self.events = events
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    async def chat(self, http: web.Request) -> web.StreamResponse:
        self.bodies.append(await http.json())
        self.headers.append(dict(http.headers))
        response = web.StreamResponse(headers={"x-request-id": "r1", "Content-Type": "text/event-stream"})
        await response.prepare(http)
        for event in self.events:
            await response.write(event.encode())
        return response


async def models(_http: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "smol"}]})


async def timeline(http: web.Request) -> web.Response:
    assert http.match_info["id"] == "r1"
    return web.json_response(TIMELINE)


async def debug_status(_http: web.Request) -> web.Response:
    return web.json_response(STATUS)


@asynccontextmanager
async def serving(handle_chat: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes(
        [
            web.post("/v1/chat/completions", handle_chat),
            web.get("/v1/models", models),
            web.get("/debug/timeline/{id}", timeline),
            web.get("/debug/status", debug_status),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def ask(handle_chat: Handler, ask_options: AskOptions | None = None, model: str | None = None) -> list[str]:
    async with serving(handle_chat) as url, Client(url, api_key="k") as client:
        async with client.chat(HELLO, ask_options or AskOptions(), model) as reply:
            texts = [text async for text in reply]
            assert reply.request_id == "r1"
            assert reply.finish_reason == "stop"
        return texts


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


async def test_text_comes_in_pieces_and_the_model_is_the_servers_own() -> None:
    server = Server(chunk("Par"), ": a comment\n\n", chunk("is"), chunk("", "stop"), DONE)
    assert await ask(server.chat, AskOptions(max_tokens=9, temperature=0.5, seed=3)) == ["Par", "is"]
    body = {"model": "smol", "messages": HELLO, "max_tokens": 9, "temperature": 0.5, "stream": True, "seed": 3}
    assert server.bodies == [body]
    assert server.headers[0]["Authorization"] == "Bearer k"


async def test_without_a_seed_none_is_sent() -> None:
    server = Server(chunk("x", "stop"), DONE)
    await ask(server.chat, model="mine")
    assert "seed" not in server.bodies[0]
    assert server.bodies[0]["model"] == "mine"


async def test_a_stream_without_its_end_is_an_error() -> None:
    with pytest.raises(ClientError, match="broke off"):
        await ask(Server(chunk("Par")).chat)


async def test_a_connection_that_is_cut_is_the_same_error() -> None:
    async def cut(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"x-request-id": "r1"})
        await response.prepare(http)
        await response.write(chunk("Par").encode())
        assert http.transport is not None
        http.transport.abort()
        return response

    async with serving(cut) as url, Client(url) as client, client.chat(HELLO, AskOptions(), "smol") as reply:
        with pytest.raises(ClientError, match="broke off"):
            async for _ in reply:
                pass


async def test_a_failure_in_the_stream_is_told_in_the_servers_words() -> None:
    failure = f"data: {json.dumps({'error': {'message': 'no decode worker is left'}})}\n\n"
    with pytest.raises(ClientError, match="no decode worker is left"):
        await ask(Server(chunk("Par"), failure).chat)


async def test_a_refusal_is_told_in_the_servers_words() -> None:
    async def refuse(_http: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "temperature must be a number"}}, status=400)

    with pytest.raises(ClientError, match=r"temperature must be a number \(status 400\)"):
        await ask(refuse)


async def test_what_is_no_such_server_is_told_apart() -> None:
    async def page(_http: web.Request) -> web.Response:
        return web.Response(text="<html>hello</html>", status=502)

    with pytest.raises(ClientError, match=r"hello.*\(status 502\)"):
        await ask(page)
    with pytest.raises(ClientError, match="no JSON"):
        await ask(Server("data: {oops\n\n").chat)
    with pytest.raises(ClientError, match="not a URL"):
        async with Client("127.0.0.1") as client:
            await client.status()


async def test_nobody_there_is_one_line() -> None:
    async with Client(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(NoServer, match="start one with 'pdserve serve'"):
            await client.status()


async def test_chat_prints_the_answer_and_its_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(Server(chunk("Paris"), chunk("", "stop"), DONE).chat) as url:
        options = ChatOptions(url=url, timeline=True)
        assert await asyncio.to_thread(chat, options, "What is the capital of France?") == 0
    out = capsys.readouterr().out
    assert out.startswith("Paris\n\ntimeline of r1")
    assert "tokenize" in out


async def test_status_is_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(Server().chat) as url:
        assert await asyncio.to_thread(status, StatusOptions(url=url)) == 0
        assert "decode-0  decode  ready" in capsys.readouterr().out
        assert await asyncio.to_thread(status, StatusOptions(url=url, json=True)) == 0
        assert json.loads(capsys.readouterr().out) == STATUS
