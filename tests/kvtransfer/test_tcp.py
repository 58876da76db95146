"""What only TCP has: addresses, ports, strangers at them, and bytes that are not ours."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.errors import PeerLostError, PeerSilentError, ProtocolError, TransferError
from kvtransfer.frames import (
    HEADER_NBYTES,
    AcceptFrame,
    BlockFrame,
    DoneFrame,
    Frame,
    OpenFrame,
    WorkingFrame,
    decode_header,
    encode,
)
from kvtransfer.messages import ConnectionLimits, Done, TransferDeadlines
from kvtransfer.tcp import TcpTransport, parse_address
from tests.kvtransfer.makers import (
    BLOCK_NBYTES,
    IMPATIENT,
    Offers,
    assert_nothing_left,
    contents,
    make_blocks,
    make_destination,
    make_request,
    soon,
    transfer_threads,
)

SLACK_S = 1.5  # of a busy machine


@asynccontextmanager
async def make_server(
    deadlines: TransferDeadlines = IMPATIENT, limits: ConnectionLimits | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[TcpTransport, Offers, str]]:
    """A transport that both serves and pulls; it offers two blocks as "h". Must still serve at the end."""
    offers = Offers()
    offers.offer(make_blocks(2))
    with assert_nothing_left():
        transport = TcpTransport(deadlines, limits)
        try:
            yield transport, offers, await transport.listen(host, 0, offers)
        finally:
            await transport.close()
    await offers.assert_no_leaks()


async def assert_serves(transport: TcpTransport, address: str) -> None:
    destination = make_destination(2)
    await soon(transport.pull(address, make_request(pull_attempt=99), destination).result())
    assert contents(destination) == contents(make_blocks(2))


def connect(address: str) -> socket.socket:
    return socket.create_connection(parse_address(address), 5.0)


def read_to_end(stranger: socket.socket) -> bytes:
    """All that comes until the other side closes. A reset ends it too."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := stranger.recv(1 << 16):
            data += part
    return data


def stream(*frames: Frame) -> bytes:
    return b"".join(bytes(part) for frame in frames for part in encode(frame))


OPEN = stream(OpenFrame(make_request(), 2, BLOCK_NBYTES))


# Addresses.


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
async def test_serves_at_a_number_and_by_name(host: str) -> None:
    async with make_server(host=host) as (transport, _, address):
        await assert_serves(transport, address)
        await assert_serves(transport, f"localhost:{parse_address(address)[1]}")


@needs_ipv6
async def test_serves_over_ipv6() -> None:
    async with make_server(host="::1") as (transport, _, address):
        assert address.startswith("[::1]:")
        await assert_serves(transport, address)


@needs_ipv6
async def test_the_address_of_all_is_of_both_families() -> None:
    async with make_server(host="::") as (transport, _, address):
        for host in ("[::1]", "127.0.0.1"):
            await assert_serves(transport, f"{host}:{parse_address(address)[1]}")


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:0", "host:65536", "host:-1", "host:1x", "h:٣"])
async def test_an_address_that_is_none_is_a_lost_peer(address: str) -> None:
    async with make_server() as (transport, _, _address):
        with pytest.raises(PeerLostError, match="host:port"):
            await soon(transport.pull(address, make_request(), make_destination(2)).result())


async def test_a_name_that_nobody_has_is_a_lost_peer() -> None:
    async with make_server() as (transport, _, _address):
        pull = transport.pull("nobody.invalid:80", make_request(), make_destination(2))
        with pytest.raises((PeerLostError, PeerSilentError)):
            await soon(pull.result(), IMPATIENT.connect_s + SLACK_S)
        for thread in transfer_threads("-resolve"):
            thread.join(20.0)


async def test_a_host_that_does_not_answer_is_silent() -> None:
    """A full backlog drops what comes, as a firewall does."""
    async with make_server(TransferDeadlines(connect_s=0.2)) as (transport, _, _address):
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
            pull = transport.pull(f"127.0.0.1:{full.getsockname()[1]}", make_request(), make_destination(2))
            with pytest.raises(PeerSilentError):
                await soon(pull.result(), 0.2 + SLACK_S)


# Strangers.


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with make_server() as (transport, _, address):
        with connect(address) as stranger:
            started = time.monotonic()
            assert await asyncio.to_thread(read_to_end, stranger) == b""
            assert IMPATIENT.open_s * 0.9 < time.monotonic() - started < IMPATIENT.open_s + SLACK_S
        await assert_serves(transport, address)


async def test_a_connection_that_speaks_too_slowly_is_closed() -> None:
    """A byte now and then is no progress towards an OPEN."""

    def drip(stranger: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            for byte in OPEN:
                stranger.send(bytes([byte]))
                if threading.Event().wait(0.05):
                    break

    async with make_server() as (transport, _, address):
        with connect(address) as stranger:
            started = time.monotonic()
            dripping = asyncio.to_thread(drip, stranger)
            await soon(asyncio.gather(dripping, asyncio.to_thread(read_to_end, stranger)))
            assert time.monotonic() - started < IMPATIENT.open_s + SLACK_S
        await assert_serves(transport, address)


async def test_connections_beyond_the_bound_are_closed_at_once() -> None:
    limits = ConnectionLimits(max_connections=3)
    async with make_server(TransferDeadlines(), limits) as (transport, _, address):
        with contextlib.ExitStack() as stack:
            first = [stack.enter_context(connect(address)) for _ in range(3)]
            while len(transfer_threads("-serve")) < 3:
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(read_to_end, stack.enter_context(connect(address))) == b""
            assert len(transfer_threads("-serve")) == 3
            first[0].close()
            while len(transfer_threads("-serve")) == 3:
                await asyncio.sleep(0.01)
            await assert_serves(transport, address)


async def test_idle_connections_are_bounded_in_number_and_time() -> None:
    limits = ConnectionLimits(max_idle=1, idle_s=0.3)
    async with make_server(TransferDeadlines(), limits) as (transport, offers, address):
        for n in range(4):
            offers.offer(make_blocks(2), f"h{n}")
        pulls = [transport.pull(address, make_request(f"h{n}"), make_destination(2)) for n in range(4)]
        for pull in pulls:
            await soon(pull.result())
        while len(transfer_threads("-serve")) > 1:
            await asyncio.sleep(0.01)
        while transfer_threads("-serve"):
            await asyncio.sleep(0.01)
        await assert_serves(transport, address)


async def test_a_peer_that_speaks_out_of_turn_is_closed() -> None:
    async with make_server() as (transport, offers, address):
        offers.offer(make_blocks(2), "h", num_finished=1)
        with connect(address) as stranger:
            stranger.sendall(OPEN)
            await offers.next_opened()
            stranger.sendall(OPEN)
            assert isinstance(await offers.next_error(), ProtocolError)
        offers.offer(make_blocks(2))
        await assert_serves(transport, address)


# Bytes that are not ours.


def claim(kind: int, length: int, index: int = 0) -> bytes:
    return struct.pack("!4sB3sIIQ", b"PDK1", kind, b"", length, index, 0)


@pytest.mark.parametrize("header", [claim(1, 0xFFFFFFFF), claim(4, 1 << 30), claim(6, 1 << 22), claim(99, 0)])
async def test_a_size_is_refused_before_memory_is_taken_for_it(header: bytes) -> None:
    async with make_server() as (transport, _, address):
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
def fake_prefill(answer: bytes) -> Iterator[str]:
    """Takes one connection, reads one OPEN, says `answer`, and closes."""

    def serve() -> None:
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
    async with make_server() as (transport, _, _address):
        with fake_prefill(answer) as address:
            pull = transport.pull(address, make_request(), make_destination(2))
            with pytest.raises(ProtocolError):
                await soon(pull.result(), 1.0)
            assert await pull.wait_released()


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
        async with make_server() as (transport, _, _address):
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
    make_data: Callable[[object], bytes], strategy: st.SearchStrategy[object]
) -> None:
    async def run(data: bytes) -> None:
        async with make_server() as (transport, offers, address):
            answer = await asyncio.to_thread(say_and_read, address, data)
            if answer:
                decode_header(answer[:HEADER_NBYTES])  # REFUSE, or where the mutation is harmless ACCEPT
            while offers.open_by_id:
                await offers.next_error()
            await assert_serves(transport, address)

    @settings(max_examples=40, deadline=None)
    @given(drawn=strategy)
    def check(drawn: object) -> None:
        asyncio.run(run(make_data(drawn)))

    check()
