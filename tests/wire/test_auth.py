"""No call without the cluster token, of whatever kind; and the token shows up nowhere."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve_wire.auth import BadTokenFile, TokenInterceptor, make_token_file, read_token, token_metadata
from pdserve_wire.channel import make_channel, make_server

TOKEN = "correct-horse-battery-staple"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
WRONG = {
    "none": (),
    "empty": token_metadata(""),
    "wrong": token_metadata("wrong-horse-battery-staple"),
    "prefix": token_metadata(TOKEN[:-1]),
    "longer": token_metadata(TOKEN + "x"),
    "other header": (("authorization", f"Bearer {TOKEN}"),),
}


class EchoServer:
    """A server with one method of each of gRPC's four kinds, that counts what reaches a handler."""

    def __init__(self) -> None:
        self.num_served = 0

    def handlers(self) -> grpc.GenericRpcHandler:
        async def unary(request: bytes, _context: Any) -> bytes:
            self.num_served += 1
            return request

        async def unary_stream(request: bytes, _context: Any) -> AsyncIterator[bytes]:
            self.num_served += 1
            yield request

        async def stream_unary(requests: AsyncIterator[bytes], _context: Any) -> bytes:
            self.num_served += 1
            return b"".join([request async for request in requests])

        async def stream_stream(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
            self.num_served += 1
            async for request in requests:
                yield request

        return grpc.method_handlers_generic_handler(
            "Echo",
            {
                "unary_unary": grpc.unary_unary_rpc_method_handler(unary),
                "unary_stream": grpc.unary_stream_rpc_method_handler(unary_stream),
                "stream_unary": grpc.stream_unary_rpc_method_handler(stream_unary),
                "stream_stream": grpc.stream_stream_rpc_method_handler(stream_stream),
            },
        )


async def call(
    channel: grpc.aio.Channel, kind: str, metadata: tuple[tuple[str, str], ...], says_nothing: bool = False
) -> bytes:
    """`says_nothing`: a stream of requests stays open and empty. (Of a refusal that arrives while the client is still
    sending, grpc.aio may report its own failed send instead.)"""

    async def requests() -> AsyncIterator[bytes]:
        if says_nothing:
            await asyncio.get_running_loop().create_future()
        yield b"hello"

    method = getattr(channel, kind)(f"/Echo/{kind}")
    made = method(requests() if kind.startswith("stream") else b"hello", metadata=metadata, timeout=10)
    if kind.endswith("unary"):
        return await made
    return b"".join([response async for response in made])


@pytest.fixture
async def served() -> AsyncIterator[tuple[EchoServer, grpc.aio.Channel]]:
    echo = EchoServer()
    server = make_server(TOKEN)
    server.add_generic_rpc_handlers((echo.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        yield echo, channel
    await server.stop(None)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_with_the_token_is_served(served: tuple[EchoServer, grpc.aio.Channel], kind: str) -> None:
    echo, channel = served
    assert await call(channel, kind, token_metadata(TOKEN)) == b"hello"
    assert echo.num_served == 1


@pytest.mark.parametrize("metadata", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_without_it_is_refused_before_a_handler_sees_it(
    served: tuple[EchoServer, grpc.aio.Channel],
    kind: str,
    metadata: tuple[tuple[str, str], ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    echo, channel = served
    caplog.set_level(logging.DEBUG)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, kind, metadata, says_nothing=True)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert echo.num_served == 0
    for told in (str(caught.value.details()), str(caught.value.trailing_metadata()), caplog.text):
        assert TOKEN not in told


async def test_an_unknown_method_stays_unknown(served: tuple[EchoServer, grpc.aio.Channel]) -> None:
    _, channel = served
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/Echo/other")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_an_interceptor_does_not_print_its_token() -> None:
    assert TOKEN not in repr(TokenInterceptor(TOKEN))


def test_a_made_file_holds_a_token_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "token"
    make_token_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = read_token(path)
    assert len(token) >= 32
    make_token_file(path)
    assert read_token(path) == token, "an existing token is kept"
    assert os.listdir(tmp_path) == ["token"]


def test_processes_that_start_at_once_agree_on_one_token(tmp_path: Path) -> None:
    path = tmp_path / "token"

    def make_and_read(_: int) -> str:
        make_token_file(path)
        return read_token(path)

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(make_and_read, range(64)))) == 1
    assert os.listdir(tmp_path) == ["token"]


@pytest.mark.parametrize(
    "content", [b"", b"short\n", b"\xff" * 40, "ünïcodé-tokens-are-refused".encode(), b"two lines are\nno one token"]
)
def test_a_file_that_holds_no_token_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(BadTokenFile, match="one ASCII line of at least 16") as caught:
        read_token(path)
    assert not content or content.decode(errors="replace").strip() not in str(caught.value)


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(BadTokenFile, match="pdserve token FILE"):
        read_token(tmp_path / "none")
    with pytest.raises(BadTokenFile, match="can't be written"):
        make_token_file(tmp_path / "no folder" / "token")
