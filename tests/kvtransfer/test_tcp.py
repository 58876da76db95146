"""What only TCP has: addresses and ports, and strangers at them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest

from kvtransfer.errors import PeerLostError, PeerSilentError, ProtocolError
from kvtransfer.frames import OpenFrame
from kvtransfer.messages import ConnectionLimits, TransferDeadlines
from kvtransfer.tcp import TcpTransport, parse_address
from tests.kvtransfer.makers import (
    BLOCK_NBYTES,
    IMPATIENT,
    assert_serves,
    connect,
    make_blocks,
    make_destination,
    make_request,
    make_tcp_server,
    read_to_end,
    soon,
    stream,
    transfer_threads,
    until,
)

SLACK_S = 1.5  # of a busy machine
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
    async with make_tcp_server(host=host) as (transport, _, address):
        await assert_serves(transport, address)
        await assert_serves(transport, f"localhost:{parse_address(address)[1]}")


@needs_ipv6
async def test_serves_over_ipv6() -> None:
    async with make_tcp_server(host="::1") as (transport, _, address):
        assert address.startswith("[::1]:")
        await assert_serves(transport, address)


@needs_ipv6
async def test_the_address_of_all_is_of_both_families() -> None:
    async with make_tcp_server(host="::") as (transport, _, address):
        for host in ("[::1]", "127.0.0.1"):
            await assert_serves(transport, f"{host}:{parse_address(address)[1]}")


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:0", "host:65536", "host:-1", "host:1x", "h:٣"])
async def test_an_address_that_is_none_is_a_lost_peer(address: str) -> None:
    async with make_tcp_server() as (transport, _, _address):
        with pytest.raises(PeerLostError, match="host:port"):
            await soon(transport.pull(address, make_request(), make_destination(2)).result())


async def test_a_name_that_nobody_has_is_a_lost_peer() -> None:
    async with make_tcp_server() as (transport, _, _address):
        pull = transport.pull("nobody.invalid:80", make_request(), make_destination(2))
        with pytest.raises((PeerLostError, PeerSilentError)):
            await soon(pull.result(), IMPATIENT.connect_s + SLACK_S)
        for thread in transfer_threads("-resolve"):
            thread.join(20.0)


async def test_a_host_that_does_not_answer_is_silent() -> None:
    """A full backlog drops what comes, as a firewall does."""
    async with make_tcp_server(TransferDeadlines(connect_s=0.2)) as (transport, _, _address):
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
    async with make_tcp_server() as (transport, _, address):
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
                time.sleep(0.05)

    async with make_tcp_server() as (transport, _, address):
        with connect(address) as stranger:
            started = time.monotonic()
            dripping = asyncio.to_thread(drip, stranger)
            await soon(asyncio.gather(dripping, asyncio.to_thread(read_to_end, stranger)))
            assert time.monotonic() - started < IMPATIENT.open_s + SLACK_S
        await assert_serves(transport, address)


async def test_connections_beyond_the_bound_are_closed_at_once() -> None:
    limits = ConnectionLimits(max_connections=3)
    async with make_tcp_server(TransferDeadlines(), limits) as (transport, _, address):
        with contextlib.ExitStack() as stack:
            first = [stack.enter_context(connect(address)) for _ in range(3)]
            await until(lambda: len(transfer_threads("-serve")) == 3)
            assert await asyncio.to_thread(read_to_end, stack.enter_context(connect(address))) == b""
            assert len(transfer_threads("-serve")) == 3
            first[0].close()
            await until(lambda: len(transfer_threads("-serve")) == 2)
            await assert_serves(transport, address)


@pytest.mark.parametrize("limits", [ConnectionLimits(max_idle=1), ConnectionLimits(idle_s=0.1)])
async def test_idle_connections_are_bounded_in_number_and_in_time(limits: ConnectionLimits) -> None:
    """By the serving side, however many the other one would like to keep."""
    async with make_tcp_server(TransferDeadlines(), limits) as (_, offers, address):
        decode = TcpTransport()
        for n in range(4):
            offers.offer(make_blocks(2), f"h{n}", num_finished=1)
        pulls = [decode.pull(address, make_request(f"h{n}"), make_destination(2)) for n in range(4)]
        outgoings = [await offers.next_opened() for _ in pulls]
        assert len(transfer_threads("-serve")) == 4
        for outgoing in outgoings:
            outgoing.finish(8, b"")
        for pull in pulls:
            await soon(pull.result())
        await until(lambda: len(transfer_threads("-serve")) == (1 if limits.max_idle == 1 else 0))
        offers.offer(make_blocks(2))
        await assert_serves(decode, address)
        await decode.close()


async def test_the_asking_side_keeps_few_idle_connections_and_none_for_long() -> None:
    limits = ConnectionLimits(max_idle=1, idle_s=0.2)
    async with make_tcp_server(TransferDeadlines()) as (_, offers, address):
        decode = TcpTransport(limits=limits)
        for n in range(3):
            offers.offer(make_blocks(2), f"h{n}", num_finished=1)
        pulls = [decode.pull(address, make_request(f"h{n}"), make_destination(2)) for n in range(3)]
        for outgoing in [await offers.next_opened() for _ in pulls]:
            outgoing.finish(8, b"")
        for pull in pulls:
            await soon(pull.result())
        await until(lambda: len(transfer_threads("-serve")) == 1)
        (kept,) = transfer_threads("-serve")
        await asyncio.sleep(limits.idle_s)  # twice as long as it keeps one
        offers.offer(make_blocks(2))
        await assert_serves(decode, address)
        await until(lambda: not kept.is_alive())
        await decode.close()


async def test_a_peer_that_speaks_out_of_turn_is_closed() -> None:
    async with make_tcp_server() as (transport, offers, address):
        offers.offer(make_blocks(2), "h", num_finished=1)
        with connect(address) as stranger:
            stranger.sendall(OPEN)
            await offers.next_opened()
            stranger.sendall(OPEN)
            assert isinstance(await offers.next_error(), ProtocolError)
        offers.offer(make_blocks(2))
        await assert_serves(transport, address)
