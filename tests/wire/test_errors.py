"""A reason survives a real gRPC call; whatever else ends a call is a lost peer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import pytest

from pdserve_pb import worker_pb2, worker_pb2_grpc
from pdserve_wire.channel import make_channel, make_server
from pdserve_wire.errors import MAX_DETAILS_LENGTH, PdserveError, Reason, Refused, Unavailable, from_status, to_status


def every_error() -> list[PdserveError]:
    return [Refused("top_k is 3"), *(Unavailable(reason, "why") for reason in Reason if reason is not Reason.REFUSED)]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: error.reason)
def test_every_reason_comes_back_as_itself(error: PdserveError) -> None:
    back = from_status(*to_status(error))
    assert (type(back), back.reason, back.message, str(back)) == (
        type(error),
        error.reason,
        error.message,
        error.message,
    )


@pytest.mark.parametrize(
    "details", [None, "", "Socket closed", "Kv_LOST: not our spelling", ": KV_LOST", "unknown: KV_LOST"]
)
def test_a_status_that_is_not_ours_is_a_lost_peer(details: str | None) -> None:
    back = from_status(grpc.StatusCode.UNAVAILABLE, details)
    assert back.reason is Reason.LOST_PEER
    assert "UNAVAILABLE" in back.message


def test_only_a_refusal_is_the_callers_fault() -> None:
    invalid = {error.reason for error in every_error() if to_status(error)[0] is grpc.StatusCode.INVALID_ARGUMENT}
    assert invalid == {Reason.REFUSED}


class FailingPrefill(worker_pb2_grpc.PrefillServicer):
    def __init__(self, fail: Callable[[grpc.aio.ServicerContext], Awaitable[None]]) -> None:
        self._fail = fail

    async def Prefill(self, request, context):  # type: ignore[no-untyped-def]
        await self._fail(context)
        yield worker_pb2.PrefillEvent()


async def error_of_a_call(fail: Callable[[grpc.aio.ServicerContext], Awaitable[None]]) -> PdserveError:
    """What a caller makes of a Prefill call that ends by `fail`."""
    server = make_server(None)
    worker_pb2_grpc.add_PrefillServicer_to_server(FailingPrefill(fail), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in worker_pb2_grpc.PrefillStub(channel).Prefill(worker_pb2.WorkerRequest(), timeout=10):
                    pass
    finally:
        await server.stop(None)
    return from_status(caught.value.code(), caught.value.details())


@pytest.mark.parametrize("error", every_error(), ids=lambda error: error.reason)
async def test_a_reason_survives_a_call(error: PdserveError) -> None:
    async def fail(context: grpc.aio.ServicerContext) -> None:
        await context.abort(*to_status(error))

    back = await error_of_a_call(fail)
    assert (back.reason, back.message) == (error.reason, error.message)


async def test_a_message_longer_than_grpc_can_carry_keeps_its_reason() -> None:
    async def fail(context: grpc.aio.ServicerContext) -> None:
        await context.abort(*to_status(Unavailable(Reason.KV_LOST, "é" * 100_000)))

    back = await error_of_a_call(fail)
    assert back.reason is Reason.KV_LOST
    assert 0 < len(back.message) <= MAX_DETAILS_LENGTH


async def test_an_exception_in_a_handler_is_a_lost_peer() -> None:
    async def fail(_context: grpc.aio.ServicerContext) -> None:
        raise ZeroDivisionError("a fault of ours")

    back = await error_of_a_call(fail)
    assert back.reason is Reason.LOST_PEER


async def test_a_worker_that_is_not_there_is_a_lost_peer() -> None:
    server = make_server(None)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.stop(None)  # the port is free again, and nobody listens on it
    async with make_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker_pb2_grpc.ControlStub(channel).Ledger(worker_pb2.LedgerRequest(), timeout=10)
    assert from_status(caught.value.code(), caught.value.details()).reason is Reason.LOST_PEER
