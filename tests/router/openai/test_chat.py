from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve_wire.messages import PrefillTimings
from router.served_model import ServedModel
from tests.router.makers import (
    EOS,
    MODEL,
    ScriptedGenerator,
    client_of,
    events_of,
    make_front,
    make_tokens,
    one_by_one,
    post,
    saying,
    serving,
)

HELLO: Any = [{"role": "user", "content": "Hello"}]
PATH = "/v1/chat/completions"


async def test_a_chat_is_answered_in_openais_form(model: ServedModel) -> None:
    generator = saying(model, "Bonjour, 日本 🦖!")
    generator.prefill = PrefillTimings(num_cached_tokens=16)
    async with serving(make_front(model, generator)) as served, client_of(served) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert served.counted() == {"length": 1, "in flight": 0}
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Bonjour, 日本 🦖!")
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    (request,) = generator.requests
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens == len(request.token_ids)
    assert answer.usage.completion_tokens == generator.num_events
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_a_cold_request_has_no_cached_tokens(model: ServedModel) -> None:
    async with serving(make_front(model, saying(model, "Hi"))) as served:
        answer = await post(served.port, chat_body(), PATH)
    assert b'"cached_tokens": 0' in answer.body


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO} | fields


async def test_the_prompt_is_the_rendered_template(model: ServedModel) -> None:
    generator = saying(model, "Hi")
    async with serving(make_front(model, generator)) as served:
        await post(served.port, chat_body(), PATH)
    assert model.chat_template is not None
    assert list(generator.requests[0].token_ids) == model.tokenizer.encode(model.chat_template.render(HELLO))


async def test_a_streamed_chat_has_the_role_the_text_and_the_reason_in_this_order(model: ServedModel) -> None:
    async with serving(make_front(model, saying(model, "One two"))) as served:
        answer = await post(served.port, chat_body(stream=True), PATH)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events_of(answer.body)
    assert done == "[DONE]"
    assert [chunk["choices"][0] for chunk in chunks] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "One"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": " two"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"},
    ]
    heads = {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}
    assert len(heads) == 1 and "chat.completion.chunk" in heads.pop()
    assert not any("usage" in chunk for chunk in chunks)


async def test_the_usage_comes_last_where_it_is_asked_for(model: ServedModel) -> None:
    async with serving(make_front(model, saying(model, "One two"))) as served, client_of(served) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_tokens_of_one_event_share_a_chunk(model: ServedModel) -> None:
    token_ids = model.tokenizer.encode("a b c d")
    generator = ScriptedGenerator([make_tokens(token_ids[:1]), make_tokens(token_ids[1:], "length", first_index=1)])
    async with serving(make_front(model, generator)) as served, client_of(served) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        texts = [chunk.choices[0].delta.content async for chunk in stream]
    assert texts == ["", "a", " b c d", None]


async def test_eos_ends_a_chat_with_stop_and_is_no_text(model: ServedModel) -> None:
    generator = ScriptedGenerator(one_by_one([*model.tokenizer.encode("Done."), EOS], "stop"))
    async with serving(make_front(model, generator)) as served, client_of(served) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Done.", "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == generator.num_events


async def test_without_a_limit_a_chat_may_fill_the_model(model: ServedModel) -> None:
    generator = saying(model, "Hi")
    async with serving(make_front(model, generator)) as served:
        await post(served.port, chat_body(), PATH)
        await post(served.port, chat_body(max_tokens=3), PATH)
        await post(served.port, chat_body(max_tokens=3, max_completion_tokens=4), PATH)
    first, second, third = generator.requests
    assert first.sampling.max_tokens == model.max_model_len - len(first.token_ids)
    assert (second.sampling.max_tokens, third.sampling.max_tokens) == (3, 4)


async def test_text_parts_are_joined(model: ServedModel) -> None:
    generator = saying(model, "Hi")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    async with serving(make_front(model, generator)) as served:
        await post(served.port, {"model": MODEL, "messages": [{"role": "user", "content": parts}]}, PATH)
    assert "one\ntwo<|im_end|>" in "".join(map(model.tokenizer.token_text, generator.requests[0].token_ids))


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (None, "messages is required"),
        ([], "at least one message"),
        ("Hello", "list"),
        (["Hello"], r"messages[0] must be an object"),
        ([{"content": "Hello"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "half \ud83d"}], "surrogate"),
    ],
)
async def test_messages_that_are_none_are_refused(model: ServedModel, messages: Any, told: str) -> None:
    async with serving(make_front(model, saying(model, "Hi"))) as served:
        answer = await post(served.port, {"model": MODEL, "messages": messages}, PATH)
        assert served.counted() == {"rejected": 1, "in flight": 0}
    assert answer.status == 400 and told in answer.error["message"]
    assert answer.error["param"] == "messages"


async def test_a_model_without_a_template_points_to_completions(model: ServedModel) -> None:
    base = replace(model, chat_template=None)
    async with serving(make_front(base, saying(model, "Hi"))) as served:
        answer = await post(served.port, chat_body(), PATH)
    assert answer.status == 400 and "/v1/completions" in answer.error["message"]
