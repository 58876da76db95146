"""The client against a real server: what it sends, when tokens came, and which failures it tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from aiohttp import web

from benchmarks.client import Ask, Client, NoServer, Target
from benchmarks.reply import Reply
from tests.benchmarks.makers import DONE, Script, chat_chunk, chunk, openai_server, usage_chunk

PAUSE_S = 0.06


async def ask(script: Script | web.Response, timeout_s: float = 30.0, api: str = "completions") -> Reply:
    async with openai_server(lambda body: script) as url, Client(Target(url, "small", api), timeout_s) as client:
        return (await client.ask("hello", Ask(max_tokens=4))).read()


def always(script: Script) -> Callable[[Mapping[str, Any]], Script]:
    return lambda body: script


async def test_times_are_those_of_arrival_while_the_stream_runs() -> None:
    reply = await ask(
        [PAUSE_S, chunk("a"), PAUSE_S, chunk("b"), 2 * PAUSE_S, chunk("c", "length"), usage_chunk(3), DONE]
    )
    assert reply.error == ""
    assert reply.ttft_s >= PAUSE_S
    first, second = reply.itl_s
    assert first >= 0.9 * PAUSE_S and second >= 1.8 * PAUSE_S
    assert reply.ended_at >= reply.token_times[-1]


async def test_a_burst_comes_at_one_time() -> None:
    reply = await ask([chunk("a"), PAUSE_S, chunk("b") + chunk("c") + chunk("d", "length"), DONE])
    assert reply.itl_s[0] >= 0.9 * PAUSE_S
    assert reply.itl_s[1:] == [0, 0]


async def test_a_chunk_in_pieces_is_there_with_its_last() -> None:
    whole = chunk("b", "length")
    reply = await ask([chunk("a"), whole[:20], PAUSE_S, whole[20:], DONE])
    assert reply.itl_s[0] >= 0.9 * PAUSE_S


async def test_a_server_without_usage_is_counted_by_chunks() -> None:
    reply = await ask([chunk("a"), chunk("b"), chunk("c", "length"), DONE])
    assert (reply.num_tokens, reply.num_prompt_tokens) == (3, 0)


async def test_a_chat_is_read_too() -> None:
    opening = chat_chunk({"role": "assistant", "content": ""})
    reply = await ask([opening, chat_chunk({"content": "a"}, "length"), DONE], api="chat")
    assert reply.num_tokens == 1


async def test_a_refusal_is_a_failure_with_its_words() -> None:
    assert (await ask(web.Response(status=503, text="busy"))).error == "HTTP 503: busy"


async def test_a_stream_that_breaks_off_is_a_failure() -> None:
    reply = await ask([chunk("a")])
    assert reply.error.startswith(("ClientPayloadError", "the stream broke off", "ServerDisconnectedError"))


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    async with openai_server(always([DONE])) as url:
        pass
    async with Client(Target(url, "small")) as client:
        assert (await client.ask("hello", Ask(4))).read().error.startswith("ClientConnectorError")


async def test_an_answer_that_never_ends_is_a_failure() -> None:
    assert (await ask([chunk("a"), 1.0, DONE], timeout_s=0.1)).error == "no end after 0.1 s"


async def test_the_body_is_what_the_api_wants() -> None:
    completion = Target("http://x", "small").body("hello", Ask(4))
    assert completion == {
        "model": "small",
        "prompt": "hello",
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    chat = Target("http://x", "small", "chat", takes_ignore_eos=False, takes_include_usage=False)
    assert chat.body("hello", Ask(4, 0.8, 0.95)) == {
        "model": "small",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "temperature": 0.8,
        "top_p": 0.95,
        "stream": True,
    }


@pytest.mark.parametrize("refused", [{"ignore_eos"}, {"stream_options"}, {"ignore_eos", "stream_options"}, set()])
async def test_a_probe_finds_which_fields_the_server_takes(refused: set[str]) -> None:
    def answer(body: Mapping[str, Any]) -> Script | web.Response:
        return web.Response(status=400, text="unknown field") if refused & set(body) else [chunk("a", "length"), DONE]

    async with openai_server(answer) as url, Client(Target(url, "small")) as client:
        assert (await client.probe("hello")).error == ""
        assert client.target.takes_ignore_eos == ("ignore_eos" not in refused)
        assert client.target.takes_include_usage == ("stream_options" not in refused)


async def test_a_probe_says_why_a_server_can_not_be_measured() -> None:
    def answer(body: Mapping[str, Any]) -> web.Response:
        return web.Response(status=404, text="no such model")

    async with openai_server(answer) as url, Client(Target(url, "large")) as client:
        with pytest.raises(NoServer, match="HTTP 404: no such model"):
            await client.probe("hello")


async def test_the_model_is_the_first_that_the_server_lists() -> None:
    async with openai_server(always([DONE])) as url, Client(Target(url, "")) as client:
        assert await client.find_model() == "small"
