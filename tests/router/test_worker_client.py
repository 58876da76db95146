"""Whatever gRPC raises reaches the router as an error of ours; no call ends without a word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from engine.sampling import SamplingParams
from pdserve_wire.channel import make_server
from pdserve_wire.errors import PdserveError, Reason, Unavailable
from pdserve_wire.messages import PrefillEvent, WorkerRequest
from router.worker_client import WorkerClient
from tests.router.played_workers import TOKEN

REQUEST = WorkerRequest("r", (1, 2), 2, SamplingParams())
Handler = Callable[[Any, Any], Awaitable[None]]


@asynccontextmanager
async def calling(handler: Handler, token: str = TOKEN) -> AsyncIterator[WorkerClient]:
    """A client of a server that answers bytes to Prefill and Ledger; it knows no other call."""
    server = make_server(TOKEN)
    for service, method, kind in (
        ("Prefill", "Prefill", grpc.unary_stream_rpc_method_handler),
        ("Control", "Ledger", grpc.unary_unary_rpc_method_handler),
    ):
        methods = grpc.method_handlers_generic_handler(f"pdserve.v1.{service}", {method: kind(handler)})
        server.add_generic_rpc_handlers((methods,))
    client = WorkerClient(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", token)
    await server.start()
    try:
        yield client
    finally:
        await client.close()
        await server.stop(0)


async def failure_of(calls: AsyncIterator[PrefillEvent] | Awaitable[str]) -> PdserveError:
    with pytest.raises(Unavailable) as failure:
        async with asyncio.timeout(5):
            if isinstance(calls, Awaitable):
                await calls
            else:
                async for _ in calls:
                    pass
    return failure.value


@pytest.mark.parametrize("answer", [b"\xff\xff\xff", b"", b"\x0a\x00"], ids=["noise", "no event", "no hand-off"])
async def test_bytes_that_are_no_message_of_ours_end_the_call(answer: bytes) -> None:
    async def handler(request: Any, context: Any) -> None:
        await context.write(answer)
        await asyncio.get_running_loop().create_future()

    async with calling(handler) as client:
        failure = await failure_of(aiter(client.prefill(REQUEST)))
        assert failure.reason is Reason.INTERNAL and "no message of ours" in failure.message


async def test_a_status_that_no_worker_wrote_is_a_lost_peer() -> None:
    async def handler(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNKNOWN, "what")

    async with calling(handler) as client:
        assert (await failure_of(aiter(client.prefill(REQUEST)))).reason is Reason.LOST_PEER
        assert (await failure_of(aiter(client.decode(REQUEST, None, 0)))).reason is Reason.LOST_PEER, "unknown method"
        assert (await failure_of(client.ledger())).reason is Reason.LOST_PEER


async def test_a_worker_that_does_not_take_our_token_is_a_lost_peer() -> None:
    async with calling(_wait, token="another token of some length") as client:
        failure = await failure_of(aiter(client.prefill(REQUEST)))
        assert failure.reason is Reason.LOST_PEER and "token" in failure.message


async def test_nobody_at_the_address_is_a_lost_peer_at_once() -> None:
    client = WorkerClient("127.0.0.1:1", TOKEN)
    assert (await failure_of(aiter(client.prefill(REQUEST)))).reason is Reason.LOST_PEER
    await client.close()


async def test_a_channel_closed_under_open_calls_ends_them_as_lost_peers() -> None:
    async with calling(_wait) as client:
        calls = [
            asyncio.create_task(failure_of(aiter(client.prefill(REQUEST)))),
            asyncio.create_task(failure_of(client.ledger())),
        ]
        await asyncio.sleep(0.05)
        await client.close()
        assert [(await call).reason for call in calls] == [Reason.LOST_PEER, Reason.LOST_PEER]


async def test_a_call_opened_on_a_closed_channel_is_a_lost_peer() -> None:
    async with calling(_wait) as client:
        await client.close()
        for open_call in (lambda: client.prefill(REQUEST), lambda: client.decode(REQUEST, None, 0)):
            with pytest.raises(Unavailable) as failure:
                open_call()
            assert failure.value.reason is Reason.LOST_PEER
        assert (await failure_of(client.ledger())).reason is Reason.LOST_PEER


async def test_who_cancels_a_reader_is_cancelled_and_not_told_of_a_lost_peer() -> None:
    async def read(client: WorkerClient) -> None:
        async for _ in client.prefill(REQUEST):
            pass

    async with calling(_wait) as client:
        for reading in (asyncio.create_task(read(client)), asyncio.create_task(client.ledger())):
            await asyncio.sleep(0.05)
            reading.cancel()
            await asyncio.wait([reading])
            assert reading.cancelled()


async def test_a_call_may_be_closed_in_any_state_and_again() -> None:
    async with calling(_wait) as client:
        unread = client.prefill(REQUEST)
        unread.close()
        ended = client.prefill(REQUEST)
        reading = asyncio.create_task(failure_of(aiter(ended)))
        await asyncio.sleep(0.05)
        ended.close()
        await reading
        for stream in (unread, ended):
            stream.close()


async def _wait(request: Any, context: Any) -> None:
    await asyncio.get_running_loop().create_future()
