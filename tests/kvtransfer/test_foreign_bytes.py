"""Bytes at either end of a TCP connection that are not ours: refused, bounded, and harmless to the next pull."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.errors import ProtocolError, TransferError
from kvtransfer.frames import (
    HEADER_NBYTES,
    AcceptFrame,
    BlockFrame,
    DoneFrame,
    OpenFrame,
    WorkingFrame,
    decode_header,
)
from kvtransfer.messages import Done
from tests.kvtransfer.makers import (
    BLOCK_NBYTES,
    assert_serves,
    connect,
    contents,
    make_blocks,
    make_destination,
    make_request,
    make_tcp_server,
    read_to_end,
    soon,
    stream,
)

OPEN = stream(OpenFrame(make_request(), 2, BLOCK_NBYTES))


def claim(kind: int, length: int, index: int = 0) -> bytes:
    return struct.pack("!4sB3sIIQ", b"PDK1", kind, b"", length, index, 0)


@pytest.mark.parametrize("header", [claim(1, 0xFFFFFFFF), claim(4, 1 << 30), claim(6, 1 << 22), claim(99, 0)])
async def test_a_size_is_refused_before_memory_is_taken_for_it(header: bytes) -> None:
    async with make_tcp_server() as (transport, _, address):
        tracemalloc.start()
        try:
            with connect(address) as stranger:
                stranger.sendall(header)
                assert await asyncio.to_thread(read_to_end, stranger) == b""
            assert tracemalloc.get_traced_memory()[1] < 1 << 19
        finally:
            tracemalloc.stop()
        await assert_serves(transport, address)


@contextmanager
def fake_prefill(*answers: bytes) -> Iterator[str]:
    """For each answer takes a connection, reads one OPEN, says the answer, and closes."""

    def serve() -> None:
        for answer in answers:
            serve_one(answer)

    def serve_one(answer: bytes) -> None:
        with contextlib.suppress(OSError):
            sock, _ = server.accept()
            with sock:
                sock.settimeout(5.0)
                header = decode_header(sock.recv(HEADER_NBYTES, socket.MSG_WAITALL))
                sock.recv(header.length, socket.MSG_WAITALL)
                sock.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            thread.join()


BLOCKS = make_blocks(2)
DONE = DoneFrame(Done(100, b"first token", 0.0, 0.0), 0)
ANSWER = stream(AcceptFrame(1), BlockFrame(0, BLOCKS[0]), WorkingFrame(5, 1), BlockFrame(1, BLOCKS[1]), DONE)


@pytest.mark.parametrize(
    "answer",
    [
        stream(DONE),
        stream(AcceptFrame(2)),
        stream(AcceptFrame(1), DONE),
        stream(AcceptFrame(1), BlockFrame(1, BLOCKS[1])),
        stream(AcceptFrame(1), BlockFrame(0, BLOCKS[0]), BlockFrame(0, BLOCKS[0])),
        stream(AcceptFrame(1), BlockFrame(0, BLOCKS[0][:-1])),
        stream(AcceptFrame(1), BlockFrame(0, BLOCKS[0]), BlockFrame(1, BLOCKS[1]), BlockFrame(2, BLOCKS[1])),
        stream(AcceptFrame(1), AcceptFrame(1)),
        stream(AcceptFrame(1)) + claim(4, 0xFFFFFFFF),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
async def test_an_answer_that_breaks_the_protocol_fails_the_pull(answer: bytes) -> None:
    async with make_tcp_server() as (transport, _, _address):
        with fake_prefill(answer) as address:
            pull = transport.pull(address, make_request(), make_destination(2))
            with pytest.raises(ProtocolError):
                await soon(pull.result(), 1.0)
            assert await pull.wait_released()


async def test_a_connection_with_bytes_that_nobody_asked_for_carries_no_second_pull() -> None:
    async with make_tcp_server() as (transport, _, _address):
        with fake_prefill(ANSWER + b"and more" * 8, ANSWER) as address:
            for _ in range(2):
                await soon(transport.pull(address, make_request(), make_destination(2)).result())


def mutate(data: bytes, mutations: list[tuple[str, int, bytes]]) -> bytes:
    for kind, position, new in mutations:
        at = position % (len(data) + 1)
        match kind:
            case "overwrite":
                data = data[:at] + new + data[at + len(new) :]
            case "insert":
                data = data[:at] + new + data[at:]
            case "delete":
                data = data[:at] + data[at + len(new) :]
            case "cut":
                data = data[:at]
    return data


MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["overwrite", "insert", "delete", "cut"]),
        st.one_of(st.integers(0, 200), st.integers(0, 1 << 14)),  # headers are at the front more often
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(mutations=MUTATIONS)
def test_a_mutated_answer_fails_or_changes_nothing(mutations: list[tuple[str, int, bytes]]) -> None:
    async def run() -> None:
        destination = make_destination(2)
        async with make_tcp_server() as (transport, _, _address):
            with fake_prefill(mutate(ANSWER, mutations)) as address:
                pull = transport.pull(address, make_request(), destination)
                try:
                    result = await soon(pull.result())
                except TransferError:
                    assert await pull.wait_released()
                else:
                    assert (result.done, contents(destination)) == (DONE.done, contents(BLOCKS))

    asyncio.run(run())


def say_and_read(address: str, data: bytes) -> bytes:
    with connect(address) as stranger, contextlib.suppress(OSError):  # it may be closed at any point
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        return read_to_end(stranger)
    return b""


@pytest.mark.parametrize(
    ("make_data", "strategy"),
    [(lambda data: data, st.binary(max_size=200)), (lambda mutations: mutate(OPEN, mutations), MUTATIONS)],
    ids=["random bytes", "a mutated OPEN"],
)
def test_whatever_comes_to_the_port_the_next_pull_is_served(
    make_data: Callable[[Any], bytes], strategy: st.SearchStrategy[Any]
) -> None:
    async def run(data: bytes) -> None:
        async with make_tcp_server() as (transport, offers, address):
            answer = await asyncio.to_thread(say_and_read, address, data)
            if answer:
                decode_header(answer[:HEADER_NBYTES])  # REFUSE, or where the mutation is harmless ACCEPT
            while offers.open_by_id:
                await offers.next_error()
            await assert_serves(transport, address)

    @settings(max_examples=40, deadline=None)
    @given(drawn=strategy)
    def check(drawn: Any) -> None:
        asyncio.run(run(make_data(drawn)))

    check()
