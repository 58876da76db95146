from __future__ import annotations

import asyncio
import gzip
import json
import logging
from typing import Any

import httpx2
import pytest

from pdserve_wire.errors import PdserveError, Reason, Refused, Unavailable
from router.openai.limits import HttpLimits
from router.served_model import ServedModel
from tests.router.makers import (
    MODEL,
    ScriptedGenerator,
    events_of,
    make_front,
    one_by_one,
    parse_response,
    post,
    raw_request,
    saying,
    send_raw,
    serving,
)

CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once"} | fields


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after", "outcome"),
    [
        (Refused("too many tokens; shorten it"), 400, None, "rejected"),
        (Unavailable(Reason.BUSY, "the queue is full"), 429, "1", "rejected"),
        (Unavailable(Reason.NO_ROOM, "no prefill worker is ready"), 503, "2", "error"),
        (Unavailable(Reason.NO_ROOM, "no decode worker is ready"), 503, "2", "error"),
        (Unavailable(Reason.DRAINING, "the worker drains"), 503, "2", "error"),
        (Unavailable(Reason.KV_LOST, "peer closed"), 503, "2", "error"),
        (Unavailable(Reason.LOST_PEER, "the worker died"), 503, "2", "error"),
        (RuntimeError("a bug"), 500, None, "error"),
    ],
)
async def test_a_failure_before_the_first_token_is_a_status(
    model: ServedModel,
    is_stream: bool,
    error: Exception,
    status: int,
    retry_after: str | None,
    outcome: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(make_front(model, ScriptedGenerator([error]))) as served:
        with caplog.at_level(logging.CRITICAL):
            answer = await post(served.port, body(stream=is_stream))
        assert served.counted() == {outcome: 1, "in flight": 0}
    assert (answer.status, answer.headers.get("retry-after")) == (status, retry_after)
    if isinstance(error, PdserveError):
        assert error.message in answer.error["message"]
    else:
        assert "a bug" not in answer.error["message"]


async def test_a_bug_is_logged_under_the_requests_id(model: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(make_front(model, ScriptedGenerator([RuntimeError("a bug")]))) as served:
        answer = await post(served.port, body())
    request_id = answer.headers["x-request-id"]
    assert request_id in answer.error["message"] and request_id in caplog.text and "a bug" in caplog.text


async def test_a_failure_after_the_first_token_is_one_event_and_no_done(model: ServedModel) -> None:
    first, second, *_ = one_by_one(model.tokenizer.encode(" one two three"))
    generator = ScriptedGenerator([first, second, Unavailable(Reason.LOST_PEER, "the worker died")])
    async with serving(make_front(model, generator)) as served:
        streamed = await post(served.port, CHAT | {"stream": True}, "/v1/chat/completions")
        whole = await post(served.port, CHAT, "/v1/chat/completions")
        assert served.counted() == {"error": 2, "in flight": 0}
    *chunks, last = events_of(streamed.body)
    assert streamed.status == 200 and len(chunks) == 3
    assert "the worker died" in last["error"]["message"] and last["error"]["code"] == "lost_peer"
    assert whole.status == 503 and "the worker died" in whole.error["message"]


async def test_a_generator_that_ends_without_a_reason_is_an_error_not_an_empty_answer(model: ServedModel) -> None:
    async with serving(make_front(model, ScriptedGenerator([]))) as served:
        answer = await post(served.port, body())
    assert answer.status == 503 and "without a finish reason" in answer.error["message"]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"model": "smol", "prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"model": "smol", "prompt": "a", "temperature": -Infinity}', "Infinity"),
        (b'{"model": "smol", "prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"model": "smol", "prompt": "a", "logit_bias": {"3": 1e999}}', "logit_bias"),
        (b'{"model": "smol", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        ('{"model": "smol", "prompt": "é"}'.encode("latin-1"), "UTF-8"),
        ('{"model": "smol", "prompt": "a"}'.encode("utf-16"), "UTF-8"),
        (b'{"model": "smol", "prompt": "half \\ud83d"}', "surrogate"),
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(model: ServedModel, data: bytes, told: str) -> None:
    async with serving(make_front(model, saying(model, " x"))) as served:
        answer = await post(served.port, data)
        assert served.counted() == {"rejected": 1, "in flight": 0}
    assert answer.status == 400 and told in answer.error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": "5"},
        {"max_tokens": True},
        {"min_tokens": 17},
        {"min_tokens": -1},
        {"temperature": -0.1},
        {"temperature": 101},
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": 2},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": "x"},
        {"repetition_penalty": 0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logprobs": 21},
        {"logprobs": True},
        {"logit_bias": [1]},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"1": "x"}},
        {"logit_bias": {"1": 101}},
        {"logit_bias": {"49152": 1}},
        {"stop": 5},
        {"stop": [5]},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": ["x"] * 17},
        {"stop": ["x" * 2000]},
        {"logit_bias": {str(token_id): 1 for token_id in range(1025)}},
        {"stop_token_ids": list(range(1025))},
        {"stop_token_ids": 5},
        {"stop_token_ids": ["5"]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [49152]},
        {"ignore_eos": 1},
        {"stream": "yes"},
        {"stream_options": {"include_usage": True}},
        {"model": 5},
    ],
    ids=lambda fields: repr(fields)[:40],
)
async def test_a_field_of_the_wrong_type_or_range_is_named(model: ServedModel, fields: dict[str, Any]) -> None:
    (name,) = fields
    async with serving(make_front(model, saying(model, " x"))) as served:
        answer = await post(served.port, body(**fields))
        assert served.counted() == {"rejected": 1, "in flight": 0}
    assert answer.status == 400 and answer.error["param"] == name
    assert name in answer.error["message"] and answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"n": True},
        {"best_of": 3},
        {"echo": True},
        {"suffix": "end"},
        {"tools": [{"type": "function"}]},
        {"functions": [{}]},
        {"tool_choice": {"type": "function"}},
        {"response_format": {"type": "json_object"}},
        {"audio": {"voice": "x"}},
        {"modalities": ["text", "audio"]},
        {"prompt_logprobs": 3},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False},
    ],
    ids=lambda fields: repr(fields)[:40],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_is_not_built_is_refused_by_name(model: ServedModel, path: str, fields: dict[str, Any]) -> None:
    (name,) = fields
    async with serving(make_front(model, saying(model, " x"))) as served:
        answer = await post(served.port, body() | CHAT | fields, path)
    assert answer.status == 400 and answer.error["param"] == name and name in answer.error["message"]


async def test_harmless_values_of_what_is_not_built_are_served(model: ServedModel) -> None:
    harmless = {"n": 1, "best_of": 1, "echo": False, "suffix": None, "tools": [], "response_format": {"type": "text"}}
    async with serving(make_front(model, saying(model, " x"))) as served:
        assert (await post(served.port, body(**harmless))).status == 200


async def test_an_unknown_model_is_404_and_named(model: ServedModel) -> None:
    async with serving(make_front(model, saying(model, " x"))) as served:
        answer = await post(served.port, body(model="gpt-9"))
        assert served.counted() == {"rejected": 1, "in flight": 0}
    assert answer.status == 404 and answer.error["code"] == "model_not_found" and "'smol'" in answer.error["message"]


async def test_a_missing_model_is_400(model: ServedModel) -> None:
    async with serving(make_front(model, saying(model, " x"))) as served:
        answer = await post(served.port, {"prompt": "Once"})
    assert answer.status == 400 and answer.error["param"] == "model"


async def test_unknown_routes_and_wrong_methods_have_openais_form(model: ServedModel) -> None:
    async with serving(make_front(model, saying(model, " x"))) as served:
        unknown = await post(served.port, body(), "/v1/completion")
        wrong = await send_raw(served.port, raw_request(b"", "/v1/completions", method="GET"))
        put = await send_raw(served.port, raw_request(b"", "/v1/models", method="PUT"))
        assert served.counted() == {"in flight": 0}
    assert unknown.status == 404 and "/v1/completion" in unknown.error["message"]
    assert wrong.status == put.status == 405
    assert wrong.headers["allow"] == "POST" and "use POST" in wrong.error["message"]
    assert all("x-request-id" in answer.headers for answer in (unknown, wrong, put))


async def test_a_body_larger_than_the_limit_is_413_whether_announced_or_not(model: ServedModel) -> None:
    limits = HttpLimits(max_body_nbytes=1000, shutdown_s=1.0)
    large = json.dumps(body(prompt="x" * 2000)).encode()
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += f"{len(large):x}\r\n".encode() + large + b"\r\n0\r\n\r\n"
    bomb = gzip.compress(large)
    async with serving(make_front(model, saying(model, " x")), limits=limits) as served:
        for request in (raw_request(large), chunked, raw_request(bomb, headers="Content-Encoding: gzip\r\n")):
            answer = await send_raw(served.port, request)
            assert answer.status == 413 and "1000 bytes" in answer.error["message"]
        assert served.counted() == {"rejected": 3, "in flight": 0}


async def test_the_default_limit_is_10_mib(model: ServedModel) -> None:
    async with serving(make_front(model, saying(model, " x"))) as served:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {(10 << 20) + 1}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
        writer.close()
        await writer.wait_closed()
    assert parse_response(answer).status == 413


async def test_a_body_that_does_not_come_is_408(model: ServedModel) -> None:
    limits = HttpLimits(body_timeout_s=0.05, shutdown_s=1.0)
    async with serving(make_front(model, saying(model, " x")), limits=limits) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
        writer.close()
        await writer.wait_closed()
        assert parse_response(answer).status == 408
        assert served.counted() == {"rejected": 1, "in flight": 0}


async def test_a_body_in_broken_chunks_is_400(model: ServedModel) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving(make_front(model, saying(model, " x"))) as served:
        assert (await send_raw(served.port, head + b"zz\r\n{}\r\n0\r\n\r\n")).status == 400


async def test_a_request_id_comes_back_where_it_is_fit_to(model: ServedModel) -> None:
    generator = saying(model, " x")
    async with serving(make_front(model, generator)) as served:
        async with httpx2.AsyncClient(base_url=served.url) as client:
            for given, is_kept in (("my-id_7", True), ("a b", False), ("x" * 65, False), ("<script>", False)):
                answer = await client.post("/v1/completions", json=body(), headers={"x-request-id": given})
                assert (answer.headers["x-request-id"] == given) is is_kept
            same = [await client.post("/v1/completions", json=body(), headers={"x-request-id": "same"}) for _ in "ab"]
        assert served.front.timelines.get("my-id_7") is not None
    assert same[0].json()["id"] != same[1].json()["id"], "our own id is unique whatever the client sends"
    assert len({request.request_id for request in generator.requests}) == len(generator.requests)
