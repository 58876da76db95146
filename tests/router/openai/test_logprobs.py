from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from engine.sampling import SamplingParams
from pdserve_wire.messages import Token, TokenLogprob
from router.openai.logprobs import CompletionLogprobs, chat_logprobs
from router.served_model import ServedModel
from tests.router.makers import (
    MODEL,
    ScriptedGenerator,
    client_of,
    events_of,
    make_front,
    make_tokens,
    pieces_of,
    post,
    serving,
)

HELLO: Any = [{"role": "user", "content": "Hello"}]


def with_logprobs(tokens: tuple[Token, ...]) -> list[tuple[Token, ...]]:
    """Events of one token each, with a log probability, the token itself and the next id as the likeliest."""
    return [
        (
            replace(
                token,
                logprob=-0.5 * (token.index + 1),
                top_logprobs=(TokenLogprob(token.token_id, -0.5), TokenLogprob(token.token_id + 1, -2.0)),
            ),
        )
        for token in tokens
    ]


def scripted(model: ServedModel, text: str) -> ScriptedGenerator:
    return ScriptedGenerator(with_logprobs(make_tokens(model.tokenizer.encode(text), "length")))


async def test_chat_logprobs_have_tokens_bytes_and_likeliest(model: ServedModel) -> None:
    async with serving(make_front(model, scripted(model, "Hi 🦖"))) as served, client_of(served) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert bytes(byte for entry in logprobs.content for byte in entry.bytes or ()).decode() == "Hi 🦖"
    assert logprobs.content[0].token == "Hi" and logprobs.content[0].logprob == -0.5
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * len(logprobs.content)


async def test_streamed_logprobs_are_those_of_the_whole_answer(model: ServedModel) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    async with serving(make_front(model, scripted(model, "Hi 🦖 there"))) as served, client_of(served) as client:
        whole = await client.chat.completions.create(**request)
        stream = await client.chat.completions.create(**request, stream=True)
        parts = [chunk.choices[0].logprobs async for chunk in stream]
    streamed = [entry for part in parts if part for entry in part.content or ()]
    assert whole.choices[0].logprobs is not None
    assert streamed == whole.choices[0].logprobs.content


async def test_completion_logprobs_have_the_older_form(model: ServedModel) -> None:
    async with serving(make_front(model, scripted(model, " a b"))) as served, client_of(served) as client:
        answer = await client.completions.create(model=MODEL, prompt="x", logprobs=2)
        none = await client.completions.create(model=MODEL, prompt="x")
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == ([" a", " b"], [-0.5, -1.0], [0, 2])
    assert [top[token] for top, token in zip(logprobs.top_logprobs, [" a", " b"], strict=True)] == [-0.5, -1.0]
    assert none.choices[0].logprobs is None


async def test_streamed_text_offsets_count_on(model: ServedModel) -> None:
    body = {"model": MODEL, "prompt": "x", "logprobs": 1, "stream": True}
    async with serving(make_front(model, scripted(model, " a🦖 b"))) as served:
        *chunks, _ = events_of((await post(served.port, body)).body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    offsets = [offset for part in parts if part for offset in part["text_offset"]]
    assert offsets[0] == 0 and offsets[-1] == 3 and offsets == sorted(offsets)
    tokens = [token for part in parts if part for token in part["tokens"]]
    assert any(token.startswith("bytes:\\x") for token in tokens), "a part of a character is shown as its bytes"


@pytest.mark.parametrize("value", [-math.inf, math.nan, None])
def test_a_logprob_that_json_has_no_number_for_is_a_very_small_one(model: ServedModel, value: float | None) -> None:
    token = Token(0, 42, logprob=value, top_logprobs=(TokenLogprob(43, -math.inf),))
    (entry,) = chat_logprobs(model.tokenizer, (token,))["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
    assert CompletionLogprobs(model.tokenizer).part((token,))["token_logprobs"] == [-9999.0]


def test_a_special_token_is_shown_by_its_name(model: ServedModel) -> None:
    (entry,) = chat_logprobs(model.tokenizer, (Token(0, 2, logprob=-1.0),))["content"]
    assert entry["token"] == "<|im_end|>" and bytes(entry["bytes"]) == b"<|im_end|>"


async def test_tokens_of_a_stop_string_are_never_shown(model: ServedModel) -> None:
    events = with_logprobs(make_tokens(model.tokenizer.encode("one two three four"), "length"))
    pieces = await pieces_of(model, events, (" two three",), SamplingParams(logprobs=0))
    shown = [model.tokenizer.token_text(token.token_id) for piece in pieces for token in piece.tokens]
    assert shown == ["one"] and pieces[-1].num_tokens == 3
    assert "".join(piece.text for piece in pieces) == "one"


async def test_tokens_that_only_began_a_stop_string_come_with_their_text(model: ServedModel) -> None:
    events = with_logprobs(make_tokens(model.tokenizer.encode("one two four"), "length"))
    pieces = await pieces_of(model, events, (" two three",), SamplingParams(logprobs=0))
    assert [(piece.text, len(piece.tokens)) for piece in pieces] == [("one", 1), ("", 0), (" two four", 2)]


async def test_top_logprobs_without_logprobs_is_refused(model: ServedModel) -> None:
    async with serving(make_front(model, scripted(model, "x"))) as served:
        answer = await post(served.port, {"model": MODEL, "messages": HELLO, "top_logprobs": 2}, "/v1/chat/completions")
    assert answer.status == 400 and answer.error["param"] == "top_logprobs"
