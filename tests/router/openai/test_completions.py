from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from router.served_model import ServedModel
from tests.router.makers import (
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


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once"} | fields


async def test_a_completion_is_answered_in_openais_form(model: ServedModel) -> None:
    async with serving(make_front(model, saying(model, " upon a time"))) as served, client_of(served) as client:
        answer = await client.completions.create(model=MODEL, prompt="Once")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (" upon a time", "length", None)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.usage is not None and answer.usage.completion_tokens == 3


async def test_a_stream_says_what_the_whole_answer_says(model: ServedModel) -> None:
    text = " upon a time, 日本 🦖 there was"
    async with serving(make_front(model, saying(model, text))) as served, client_of(served) as client:
        stream = await client.completions.create(model=MODEL, prompt="Once", stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.text for choice in choices) == text
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]


async def test_emoji_and_cjk_through_byte_level_tokens_are_valid_utf8_in_every_chunk(model: ServedModel) -> None:
    text = "🦖👩‍👩‍👧‍👦 漢字かな🇩🇪"
    async with serving(make_front(model, saying(model, text))) as served:
        answer = await post(served.port, body(stream=True))
    *chunks, _ = events_of(answer.body)
    told = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(told) == text
    assert not any("\ufffd" in part for part in told)
    assert answer.body.isascii(), "a reader that splits at bytes or at U+2028 can't split a character"


@pytest.mark.parametrize("num", [1, 2])
async def test_max_tokens_1_and_2_are_exact_and_end_with_length(model: ServedModel, num: int) -> None:
    generator = ScriptedGenerator(
        lambda request: one_by_one(model.tokenizer.encode(" a b c")[: request.sampling.max_tokens])
    )
    async with serving(make_front(model, generator)) as served, client_of(served) as client:
        answer = await client.completions.create(model=MODEL, prompt="Once", max_tokens=num)
    assert answer.usage is not None and answer.usage.completion_tokens == num
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "same"),
    [
        ("Once", "Once"),
        (["Once"], "Once"),
        ([42, 43], (42, 43)),
        ([[42, 43]], (42, 43)),
        (" ", " "),
        ("<|im_start|>", "<|im_start|>"),
    ],
)
async def test_every_form_of_one_prompt_is_served(model: ServedModel, prompt: Any, same: Any) -> None:
    generator = saying(model, " x")
    async with serving(make_front(model, generator)) as served:
        answer = await post(served.port, body(prompt=prompt))
    assert answer.status == 200
    expected = model.tokenizer.encode(same) if isinstance(same, str) else same
    assert generator.requests[0].token_ids == tuple(expected)


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], None, 7, [1.5], [True], ["a", "b"], [[1], [2]], {"a": 1}, [-1]])
async def test_prompts_that_are_none_are_refused_and_others_go_on(model: ServedModel, prompt: Any) -> None:
    async with serving(make_front(model, saying(model, " x"))) as served:
        answer = await post(served.port, body(prompt=prompt))
        assert answer.status == 400 and "prompt" in answer.error["message"] and answer.error["param"] == "prompt"
        assert (await post(served.port, body())).status == 200
        assert served.counted() == {"rejected": 1, "length": 1, "in flight": 0}


async def test_a_token_outside_the_vocabulary_is_named(model: ServedModel) -> None:
    async with serving(make_front(model, saying(model, " x"))) as served:
        answer = await post(served.port, body(prompt=[5, model.vocab_size]))
        served_at_the_edge = await post(served.port, body(prompt=[model.vocab_size - 1]))
    assert answer.status == 400 and str(model.vocab_size) in answer.error["message"]
    assert served_at_the_edge.status == 200


async def test_a_prompt_of_exactly_max_model_len_has_no_room_for_a_reply(model: ServedModel) -> None:
    generator = saying(model, " x")
    limit = model.max_model_len
    async with serving(make_front(model, generator)) as served:
        for num_tokens in (limit, limit + 1):
            answer = await post(served.port, body(prompt=[42] * num_tokens))
            assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
            assert f"{num_tokens} tokens" in answer.error["message"] and str(limit) in answer.error["message"]
        assert (await post(served.port, body(prompt=[42] * (limit - 1)))).status == 200
    assert [request.sampling.max_tokens for request in generator.requests] == [1]


async def test_max_tokens_beyond_the_room_is_refused_with_the_numbers(model: ServedModel) -> None:
    generator = saying(model, " x")
    async with serving(make_front(model, generator)) as served:
        answer = await post(served.port, body(prompt=[42] * 100, max_tokens=29))
        assert (await post(served.port, body(prompt=[42] * 100, max_tokens=28))).status == 200
    assert answer.status == 400 and answer.error["param"] == "max_tokens"
    assert "lower max_tokens to 28" in answer.error["message"]


async def test_text_far_beyond_the_model_is_refused_before_it_is_tokenized(model: ServedModel) -> None:
    async with serving(make_front(model, saying(model, " x"))) as served:
        answer = await post(served.port, body(prompt="a b " * 500_000))
    assert answer.status == 400 and "characters" in answer.error["message"]


async def test_every_sampling_field_reaches_the_generator(model: ServedModel) -> None:
    generator = saying(model, " x")
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
    }
    async with serving(make_front(model, generator)) as served:
        answer = await post(served.port, body(logit_bias={"17": -5, "18": 1.5}, logprobs=3, **fields))
    assert answer.status == 200
    sampling = generator.requests[0].sampling
    for name, value in fields.items():
        found = getattr(sampling, name)
        assert (list(found) if isinstance(found, tuple) else found) == value
    assert sampling.logit_bias == MappingProxyType({17: -5.0, 18: 1.5}) and sampling.logprobs == 3


async def test_what_is_left_out_or_null_has_openais_default(model: ServedModel) -> None:
    generator = saying(model, " x")
    fields = ("temperature", "top_p", "top_k", "max_tokens", "stop", "logit_bias", "stream", "stream_options", "n")
    async with serving(make_front(model, generator)) as served:
        await post(served.port, body())
        await post(served.port, body(**dict.fromkeys(fields), unknown_field={"a": 1}, metadata={"k": "v"}))
    for request in generator.requests:
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 1.0, 0, 16)
    first, second = (request.sampling.seed for request in generator.requests)
    assert first != second, "a missing seed is drawn"


async def test_top_k_off_and_beyond_the_vocabulary(model: ServedModel) -> None:
    generator = saying(model, " x")
    async with serving(make_front(model, generator)) as served:
        await post(served.port, body(top_k=-1))
        await post(served.port, body(top_k=2**40))
    assert [request.sampling.top_k for request in generator.requests] == [0, model.vocab_size]


async def test_a_stop_string_split_over_tokens_ends_the_reply_and_the_generation(model: ServedModel) -> None:
    token_ids = model.tokenizer.encode(" one two three four five")
    generator = ScriptedGenerator(one_by_one(token_ids))
    request = body(stop=["o three"])
    async with serving(make_front(model, generator)) as served:
        whole = await post(served.port, request)
        streamed = await post(served.port, request | {"stream": True})
        assert served.counted() == {"stop": 2, "in flight": 0}
    assert generator.num_aborted == 2, "what still ran was aborted"
    assert generator.num_events == 6, "nothing was read after the stop"
    assert b'"text": " one tw", "logprobs": null, "finish_reason": "stop"' in whole.body
    texts = [chunk["choices"][0]["text"] for chunk in events_of(streamed.body)[:-1]]
    assert "".join(texts) == " one tw"


async def test_tokens_after_a_stop_string_in_the_same_event_are_not_counted(model: ServedModel) -> None:
    generator = ScriptedGenerator([make_tokens(model.tokenizer.encode(" one two three four"))])
    async with serving(make_front(model, generator)) as served, client_of(served) as client:
        answer = await client.completions.create(model=MODEL, prompt="Once", stop=" two")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" one", "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == 2
