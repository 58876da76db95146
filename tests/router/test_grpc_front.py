from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve_pb import generation_pb2 as pb
from pdserve_pb.generation_pb2_grpc import GenerationStub
from pdserve_wire.channel import make_channel, make_server
from pdserve_wire.errors import Reason, Refused, Unavailable
from pdserve_wire.messages import PrefillTimings
from router.front import Front
from router.grpc_front import Health, add_grpc_front
from router.served_model import ServedModel
from tests.router.makers import (
    MODEL,
    ScriptedGenerator,
    counted,
    make_front,
    make_tokens,
    one_by_one,
    post,
    saying,
    serving,
    until,
)


class Readiness:
    def __init__(self) -> None:
        self.reason: str | None = None

    def __call__(self) -> str | None:
        return self.reason


@asynccontextmanager
async def grpc_serving(front: Front, readiness: Readiness | None = None) -> AsyncIterator[tuple[Any, Health]]:
    """A channel to a gRPC front that listens."""
    server = make_server(None)
    health = await add_grpc_front(server, front, readiness or Readiness())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            yield channel, health
    finally:
        await server.stop(0)


def make_request(**fields: Any) -> pb.GenerateRequest:
    if not {"prompt", "tokens", "chat"} & set(fields):
        fields["prompt"] = "Once"
    return pb.GenerateRequest(**({"model": MODEL} | fields))


async def generate(channel: Any, request: pb.GenerateRequest, **options: Any) -> list[pb.GenerateResponse]:
    return [response async for response in GenerationStub(channel).Generate(request, timeout=10, **options)]


async def test_text_comes_in_pieces_and_the_usage_with_the_last(model: ServedModel) -> None:
    generator = saying(model, " upon a 🦖")
    generator.prefill = PrefillTimings(num_cached_tokens=1)
    front = make_front(model, generator)
    async with grpc_serving(front) as (channel, _):
        *responses, last = await generate(channel, make_request(max_tokens=9))
        assert counted(front.metrics) == {"length": 1, "in flight": 0}
    assert "".join(response.text for response in [*responses, last]) == " upon a 🦖"
    token_ids = [token_id for response in [*responses, last] for token_id in response.token_ids]
    assert token_ids == model.tokenizer.encode(" upon a 🦖")
    assert all(response.finish_reason == "" and not response.HasField("usage") for response in responses)
    assert last.finish_reason == "length"
    usage = last.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (1, len(token_ids), 1)
    assert len({response.request_id for response in [*responses, last]}) == 1


async def test_a_call_asks_for_what_the_same_http_request_asks_for(model: ServedModel) -> None:
    generator = saying(model, " x")
    front = make_front(model, generator)
    fields: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.25,
        "seed": 2**63,
        "ignore_eos": True,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "stop_token_ids": [5],
    }
    async with serving(front) as served, grpc_serving(front) as (channel, _):
        await post(served.port, {"model": MODEL, "prompt": "Once", "logit_bias": {"3": 1.0}} | fields)
        await generate(channel, make_request(logit_bias={3: 1.0}, **fields))
        await post(served.port, {"model": MODEL, "prompt": [4, 5], "seed": 1})
        await generate(channel, make_request(tokens=pb.TokensInput(token_ids=[4, 5]), seed=1))
        messages = [{"role": "user", "content": "Hello"}]
        await post(served.port, {"model": MODEL, "messages": messages, "seed": 0}, "/v1/chat/completions")
        await generate(channel, make_request(chat=pb.ChatInput(messages=[pb.ChatMessage(**messages[0])]), seed=0))
    asked = [(request.token_ids, request.sampling) for request in generator.requests]
    assert asked[0] == asked[1] and asked[2] == asked[3] and asked[4] == asked[5]


async def test_the_calls_deadline_is_the_requests(model: ServedModel) -> None:
    generator = saying(model, " x")
    async with grpc_serving(make_front(model, generator)) as (channel, _):
        await generate(channel, make_request())
    assert 5 < generator.requests[0].timeout_s < 11  # a deadline travels in round numbers


async def test_a_stop_string_leaves_no_trace_in_text_or_tokens(model: ServedModel) -> None:
    generator = ScriptedGenerator([make_tokens(model.tokenizer.encode(" one two three four"))])
    async with grpc_serving(make_front(model, generator)) as (channel, _):
        (response,) = await generate(channel, make_request(stop=[" two three"]))
    assert (response.text, response.finish_reason) == (" one", "stop")
    assert list(response.token_ids) == model.tokenizer.encode(" one")
    assert generator.num_aborted == 1


@pytest.mark.parametrize(
    ("fields", "code", "told"),
    [
        ({"model": "gpt-9"}, grpc.StatusCode.NOT_FOUND, "'smol'"),
        ({"prompt": ""}, grpc.StatusCode.INVALID_ARGUMENT, "empty"),
        ({"tokens": pb.TokensInput()}, grpc.StatusCode.INVALID_ARGUMENT, "empty"),
        ({"tokens": pb.TokensInput(token_ids=[10**6])}, grpc.StatusCode.INVALID_ARGUMENT, "vocabulary"),
        ({"tokens": pb.TokensInput(token_ids=[4] * 128)}, grpc.StatusCode.INVALID_ARGUMENT, "128 tokens"),
        ({"chat": pb.ChatInput()}, grpc.StatusCode.INVALID_ARGUMENT, "at least one"),
        ({"chat": pb.ChatInput(messages=[pb.ChatMessage()])}, grpc.StatusCode.INVALID_ARGUMENT, "role"),
        ({"temperature": float("nan")}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"top_p": 2.0}, grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
        ({"max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        ({"max_tokens": 200}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        ({"stop": [""]}, grpc.StatusCode.INVALID_ARGUMENT, "stop"),
        ({"logit_bias": {10**6: 1.0}}, grpc.StatusCode.INVALID_ARGUMENT, "logit_bias"),
        ({"logprobs": 1}, grpc.StatusCode.INVALID_ARGUMENT, "logprobs"),
    ],
)
async def test_what_can_not_be_served_is_a_status(
    model: ServedModel, fields: dict[str, Any], code: grpc.StatusCode, told: str
) -> None:
    front = make_front(model, saying(model, " x"))
    async with grpc_serving(front) as (channel, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(channel, make_request(**fields))
        assert counted(front.metrics) == {"rejected": 1, "in flight": 0}
    assert raised.value.code() is code and told in (raised.value.details() or "")


async def test_a_call_without_input_is_refused(model: ServedModel) -> None:
    async with grpc_serving(make_front(model, saying(model, " x"))) as (channel, _):
        with pytest.raises(grpc.aio.AioRpcError, match="prompt, tokens or chat"):
            await generate(channel, pb.GenerateRequest(model=MODEL))


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Refused("too long"), grpc.StatusCode.INVALID_ARGUMENT),
        (Unavailable(Reason.BUSY, "full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable(Reason.NO_ROOM, "no worker"), grpc.StatusCode.UNAVAILABLE),
        (Unavailable(Reason.KV_LOST, "gone"), grpc.StatusCode.UNAVAILABLE),
        (RuntimeError("a bug"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_failure_is_a_status_before_and_after_the_first_token(
    model: ServedModel, error: Exception, code: grpc.StatusCode, is_started: bool
) -> None:
    first = one_by_one(model.tokenizer.encode(" one two"))[:1] if is_started else []
    async with grpc_serving(make_front(model, ScriptedGenerator([*first, error]))) as (channel, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(channel, make_request())
    assert raised.value.code() is code and "a bug" not in (raised.value.details() or "")


@pytest.mark.parametrize("is_started", [False, True])
async def test_a_cancelled_call_aborts_its_request(model: ServedModel, is_started: bool) -> None:
    first = one_by_one(model.tokenizer.encode(" one two"))[:1] if is_started else []
    generator = ScriptedGenerator([*first, asyncio.Event()])
    front = make_front(model, generator)
    async with grpc_serving(front) as (channel, _):
        call = GenerationStub(channel).Generate(make_request())
        if is_started:
            await call.read()
        await until(lambda: generator.num_open == 1)
        call.cancel()
        await asyncio.wait_for(generator.all_closed.wait(), 1)
        await until(lambda: counted(front.metrics) == {"abort": 1, "in flight": 0})
    assert generator.num_aborted == 1


async def test_a_channel_that_breaks_aborts_its_requests(model: ServedModel) -> None:
    generator = ScriptedGenerator([asyncio.Event()])
    front = make_front(model, generator)
    async with grpc_serving(front) as (channel, _):
        calls = [GenerationStub(channel).Generate(make_request()) for _ in range(3)]
        reads = [asyncio.create_task(call.read()) for call in calls]
        await until(lambda: generator.num_open == 3)
        await channel.close()
        await asyncio.wait_for(generator.all_closed.wait(), 2)
        await asyncio.gather(*reads, return_exceptions=True)
        assert generator.num_aborted == 3


async def test_api_keys_hold_for_grpc_too(model: ServedModel) -> None:
    front = make_front(model, saying(model, " x"), api_keys=("right",))
    async with grpc_serving(front) as (channel, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(channel, make_request())
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await generate(channel, make_request(), metadata=(("authorization", "Bearer right"),))


async def test_the_client_may_name_its_request(model: ServedModel) -> None:
    front = make_front(model, saying(model, " x"))
    async with grpc_serving(front) as (channel, _):
        call = GenerationStub(channel).Generate(make_request(), metadata=(("x-request-id", "mine"),))
        assert [response async for response in call]
        assert dict(await call.initial_metadata())["x-request-id"] == "mine"
    assert front.timelines.get("mine") is not None


async def test_health_follows_readiness_and_tells_watchers(model: ServedModel) -> None:
    readiness = Readiness()
    states = health_pb2.HealthCheckResponse
    async with grpc_serving(make_front(model, saying(model, " x")), readiness) as (channel, health):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="pdserve.v1.Generation"))
        assert (await watch.read()).status == states.SERVING
        readiness.reason = "no decode worker is ready"
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == states.NOT_SERVING
        assert (await asyncio.wait_for(watch.read(), 1)).status == states.NOT_SERVING
        readiness.reason = None
        await health.refresh()
        assert (await asyncio.wait_for(watch.read(), 1)).status == states.SERVING
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services_and_their_messages(model: ServedModel) -> None:
    async with grpc_serving(make_front(model, saying(model, " x"))) as (channel, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="pdserve.v1.Generation"),
        ]
        listed, described = [response async for response in stub.ServerReflectionInfo(iter(asked))]
    services = {service.name for service in listed.list_services_response.service}
    assert {"pdserve.v1.Generation", "grpc.health.v1.Health"} <= services
    assert b"GenerateRequest" in described.file_descriptor_response.file_descriptor_proto[0]
