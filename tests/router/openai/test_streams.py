from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from router.generation import GenerationRequest
from router.openai.limits import HttpLimits
from router.served_model import ServedModel
from tests.router.makers import (
    MODEL,
    ScriptedGenerator,
    Step,
    chunks_of,
    client_of,
    events_of,
    make_front,
    make_tokens,
    one_by_one,
    raw_request,
    serving,
    until,
)

TEXT = 42


def request_bytes(is_stream: bool, **fields: Any) -> bytes:
    return raw_request(json.dumps({"model": MODEL, "prompt": "Once", "stream": is_stream} | fields).encode())


def endless(model: ServedModel) -> Iterator[Step]:
    """Events of 160 kB of text each."""
    longest = max(range(model.tokenizer.vocab_size), key=lambda token_id: len(model.tokenizer.bytes_of(token_id)))
    while True:
        yield make_tokens([longest] * 2000)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_aborts_its_request(
    model: ServedModel, is_stream: bool
) -> None:
    generator = ScriptedGenerator([asyncio.Event()])
    async with serving(make_front(model, generator)) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request_bytes(is_stream))
        await until(lambda: generator.num_open == 1)
        writer.close()
        await writer.wait_closed()
        await asyncio.wait_for(generator.all_closed.wait(), 1)
        await until(lambda: served.counted() == {"abort": 1, "in flight": 0})
    assert generator.num_aborted == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_in_the_middle_aborts_its_request(model: ServedModel, is_stream: bool) -> None:
    generator = ScriptedGenerator([make_tokens([TEXT]), make_tokens([TEXT]), asyncio.Event()])
    async with serving(make_front(model, generator)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request_bytes(is_stream))
        if is_stream:
            await reader.readuntil(b"data: ")
        await until(lambda: generator.num_events == 2)
        writer.close()
        await writer.wait_closed()
        await asyncio.wait_for(generator.all_closed.wait(), 1)
        await until(lambda: served.counted() == {"abort": 1, "in flight": 0})


async def test_a_client_that_resets_its_connection_while_tokens_flow_aborts_its_request(model: ServedModel) -> None:
    def steps(request: GenerationRequest) -> Iterator[Step]:
        for _ in range(100_000):
            yield make_tokens([TEXT])

    generator = ScriptedGenerator(steps)
    async with serving(make_front(model, generator)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request_bytes(True))
        await reader.readuntil(b"data: ")
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        writer.transport.abort()
        await asyncio.wait_for(generator.all_closed.wait(), 2)
        await until(lambda: served.counted() == {"abort": 1, "in flight": 0})


async def test_a_client_that_leaves_while_it_sends_its_body_is_counted(model: ServedModel) -> None:
    generator = ScriptedGenerator([])
    async with serving(make_front(model, generator)) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        await until(lambda: served.counted() == {"in flight": 1})
        writer.close()
        await writer.wait_closed()
        await until(lambda: served.counted() == {"abort": 1, "in flight": 0})
    assert not generator.requests


async def test_a_slow_reader_stops_the_generator_instead_of_filling_memory(model: ServedModel) -> None:
    generator = ScriptedGenerator(lambda request: endless(model))
    async with serving(make_front(model, generator)) as served:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", served.port))
        await loop.sock_sendall(connection, request_bytes(True))
        before = -1
        while generator.num_events != before:  # until nothing moves any more
            before = generator.num_events
            await asyncio.sleep(0.3)
        assert 0 < generator.num_events < 500, "it waits for the reader"
        assert generator.num_open == 1
        connection.close()
        await asyncio.wait_for(generator.all_closed.wait(), 2)
        await until(lambda: served.counted() == {"abort": 1, "in flight": 0})


async def test_a_reader_that_takes_nothing_at_all_is_dropped(model: ServedModel) -> None:
    generator = ScriptedGenerator(lambda request: endless(model))
    limits = HttpLimits(stalled_client_s=0.2, shutdown_s=1.0)
    async with serving(make_front(model, generator), limits=limits) as served:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", served.port))
        await loop.sock_sendall(connection, request_bytes(True))
        await until(lambda: generator.num_open == 1)
        await asyncio.wait_for(generator.all_closed.wait(), 5)
        await until(lambda: served.counted() == {"abort": 1, "in flight": 0})
        connection.close()


async def test_no_header_is_sent_before_the_first_token(model: ServedModel) -> None:
    gate = asyncio.Event()
    generator = ScriptedGenerator([gate, *one_by_one([TEXT, TEXT])])
    async with serving(make_front(model, generator)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request_bytes(True))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        gate.set()
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 200 OK")
        writer.close()
        await writer.wait_closed()


async def test_each_event_is_told_when_it_comes(model: ServedModel) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    generator = ScriptedGenerator([make_tokens([TEXT]), gates[0], make_tokens([TEXT]), gates[1], *one_by_one([TEXT])])
    async with serving(make_front(model, generator)) as served, client_of(served) as client:
        stream = await client.completions.create(model=MODEL, prompt="Once", stream=True)
        chunks = stream.__aiter__()
        await asyncio.wait_for(anext(chunks), 1)
        gates[0].set()
        await asyncio.wait_for(anext(chunks), 1)
        gates[1].set()
        assert len([chunk async for chunk in chunks]) == 2


async def test_a_first_token_without_text_still_tells_the_client_that_it_is_served(model: ServedModel) -> None:
    first, *rest = model.tokenizer.encode("🦖")
    gate = asyncio.Event()
    generator = ScriptedGenerator([make_tokens([first]), gate, *one_by_one(rest)])
    async with serving(make_front(model, generator)) as served, client_of(served) as client:
        stream = await client.completions.create(model=MODEL, prompt="Once", stream=True)
        chunks = stream.__aiter__()
        assert (await asyncio.wait_for(anext(chunks), 1)).choices[0].text == ""
        gate.set()
        assert [chunk.choices[0].text async for chunk in chunks] == ["🦖", ""]


async def test_tokens_without_text_write_nothing(model: ServedModel) -> None:
    dino = model.tokenizer.encode("🦖")
    generator = ScriptedGenerator(one_by_one([TEXT, *dino, *dino]))
    async with serving(make_front(model, generator)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request_bytes(True))
        _, _, answer = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    writes = [chunk for chunk in chunks_of(answer) if chunk]
    assert [len(events_of(write)) for write in writes] == [1, 1, 3], "the last text, the reason and [DONE] go together"


async def test_many_streams_at_once_do_not_mix(model: ServedModel) -> None:
    def steps(request: GenerationRequest) -> list[tuple[Any, ...]]:
        return list(one_by_one([request.token_ids[0]] * 20))

    generator = ScriptedGenerator(steps)
    async with serving(make_front(model, generator)) as served, client_of(served) as client:

        async def one(token_id: int) -> str:
            stream = await client.completions.create(model=MODEL, prompt=[token_id], max_tokens=20, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        answers = await asyncio.gather(*(one(1000 + place) for place in range(50)))
        assert served.counted() == {"length": 50, "in flight": 0}
    assert answers == [model.tokenizer.decode([1000 + place] * 20) for place in range(50)]
