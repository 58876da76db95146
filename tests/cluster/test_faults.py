"""Faults that public prefill/decode systems had, told as cases for this one, through both pools."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from engine.sampling import SamplingParams
from kvtransfer.faulty import FaultPlan, FaultyTransport
from kvtransfer.frames import FrameType
from kvtransfer.messages import TransferDeadlines
from kvtransfer.tcp import TcpTransport
from kvtransfer.transport import Transport
from pdserve_pb import worker_pb2 as pb
from pdserve_pb import worker_pb2_grpc as pb_grpc
from pdserve_wire.auth import read_token, token_metadata
from pdserve_wire.channel import make_channel
from pdserve_wire.errors import Refused, Unavailable
from pdserve_wire.messages import KvHandoff, Layout, WorkerRequest, handoff_to_pb, request_to_pb
from tests.cluster.makers import GREEDY, Cluster, ClusterPlan, cluster, until

PROMPT = list(range(200, 300))
FP32 = ClusterPlan(dtype="float32")


def faulty(plan: FaultPlan) -> Transport:
    return FaultyTransport(TcpTransport(TransferDeadlines(peer_timeout_s=2.0, release_s=0.3)), plan)


async def test_a_late_write_into_an_aborted_block_harms_nobody(model_folder: Path, tmp_path: Path) -> None:
    """faults: a write into decode's block is delayed 500 ms; its request is aborted; another request wants blocks."""
    async with cluster(model_folder, tmp_path, FP32) as made:
        expected = await made.token_ids(PROMPT)
    plan = replace(FP32, num_decode_blocks=10, decode_transport=lambda: faulty(FaultPlan(delay_s=0.5, delay_block=3)))
    async with cluster(model_folder, tmp_path, plan) as made:
        pool = made.decode[0].state.engine.pool
        victim = asyncio.create_task(made.generate(list(range(1000, 1090))))
        await until(lambda: pool.ledger()["writing"] > 0)
        victim.cancel()
        assert await made.token_ids(PROMPT) == expected


async def test_a_transfer_that_does_not_let_go_is_quarantined_and_its_blocks_are_never_given_out(
    model_folder: Path, tmp_path: Path
) -> None:
    plan = replace(FP32, num_decode_blocks=400, decode_transport=lambda: faulty(FaultPlan(is_release_refused=True)))
    with pytest.raises(AssertionError, match='"quarantined": 38'):
        async with cluster(model_folder, tmp_path, plan) as made:
            pool = made.decode[0].state.engine.pool
            victim = asyncio.create_task(made.generate(list(range(1000, 1600))))  # ten chunks: the pull is open long
            await until(lambda: pool.ledger()["writing"] > 0)
            victim.cancel()
            await until(lambda: pool.ledger()["quarantined"] == 38)
            assert len(await made.token_ids(PROMPT)) == 16
            assert pool.ledger()["quarantined"] == 38
            assert sum(pool.ledger().values()) == 400


async def test_a_flipped_byte_is_detected_and_never_decoded_from(model_folder: Path, tmp_path: Path) -> None:
    """faults: 50 transfers at once, checksums on both sides, one byte flipped in one of them."""
    prompt, sampling = PROMPT[:40], replace(GREEDY, max_tokens=3)
    async with cluster(model_folder, tmp_path, FP32) as made:
        expected = await made.token_ids(prompt, sampling)
    plan = replace(FP32, num_decode_blocks=512, decode_transport=lambda: faulty(FaultPlan(flip_block=2, num_flips=1)))
    async with cluster(model_folder, tmp_path, plan) as made:
        answers = await asyncio.gather(*(made.token_ids(prompt, sampling) for _ in range(50)))
        assert answers == [expected] * 50
        assert made.decode[0].state.puller.counters.num_checksum_failures == 1


async def test_a_prefill_that_raises_on_send_is_known_at_once(model_folder: Path, tmp_path: Path) -> None:
    """faults: the transport raises on send: decode knows in under 1 s."""
    plan = replace(FP32, prefill_transport=lambda: faulty(FaultPlan(raise_on=FrameType.BLOCK)))
    async with cluster(model_folder, tmp_path, plan) as made:
        started_at = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable):
            await made.generate(PROMPT)
        assert asyncio.get_running_loop().time() - started_at < 8.0  # every attempt fails at once
        assert made.decode[0].state.puller.failures.total() >= 3


async def test_a_prompt_as_long_as_the_model_and_one_token_more(model_folder: Path, tmp_path: Path) -> None:
    """faults: prompt of exactly max_model_len, and one token more."""
    async with cluster(model_folder, tmp_path, replace(FP32, max_model_len=128)) as made:
        tokens = await made.generate(list(range(100, 227)), replace(GREEDY, max_tokens=1))
        assert [token.finish_reason for token in tokens] == ["length"]
        for too_long in (128, 129):
            with pytest.raises(Refused, match="length 128"):
                await made.generate(list(range(100, 100 + too_long)), replace(GREEDY, max_tokens=1))


async def test_each_field_of_the_layout_is_refused_by_name_before_any_kv_moves(
    model_folder: Path, tmp_path: Path
) -> None:
    """faults: each field of the layout record changed alone."""
    async with cluster(model_folder, tmp_path) as made:
        decode = made.decode[0]
        hello = made.router.fleet.ready("decode")[0].hello
        channel = make_channel(hello.grpc_address)
        metadata = token_metadata(read_token(tmp_path / "token"))
        request = WorkerRequest("r", tuple(PROMPT), len(PROMPT), GREEDY)
        for field in fields(Layout):
            if field.name == "weights":
                continue
            value = getattr(hello.layout, field.name)
            other = replace(hello.layout, **{field.name: value + 1 if isinstance(value, int) else value + "x"})
            handoff = KvHandoff("h" * 32, "127.0.0.1:1", 1, len(PROMPT), other)
            message = pb.DecodeRequest(request=request_to_pb(request), handoff=handoff_to_pb(handoff))
            call = pb_grpc.DecodeStub(channel).Decode(message, metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError, match=f"layout.{field.name}"):
                async for _ in call:
                    pass
        assert decode.state.puller.failures.total() == 0
        await channel.close(None)


async def test_a_worker_port_refuses_strangers(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as made:
        for worker in made.router.fleet.ready("prefill", "decode"):
            channel = make_channel(worker.hello.grpc_address)
            for metadata in ((), token_metadata("not the cluster's token")):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await pb_grpc.ControlStub(channel).Ledger(pb.LedgerRequest(), metadata=metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await channel.close(None)


FIELDS: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 6, "ignore_eos": False},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "seed": {"temperature": 1.0, "seed": 99},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {100: 30.0}},
    "stop_token_ids": {"stop_token_ids": (100,), "logit_bias": {100: 50.0}, "min_tokens": 3},
    "logprobs": {"logprobs": 5},
}


async def test_every_request_field_gives_through_both_pools_what_it_gives_on_one_engine(
    model_folder: Path, tmp_path: Path
) -> None:
    """faults: every request field on its own through both pools; logprobs of the first token (made by prefill)."""

    async def answers(made: Cluster) -> dict[str, list[tuple[Any, ...]]]:
        async def one(given: dict[str, Any]) -> list[tuple[Any, ...]]:
            tokens = await made.generate(PROMPT[:40], replace(GREEDY, max_tokens=8, **given))
            return [
                (
                    token.index,
                    token.token_id,
                    token.finish_reason,
                    token.logprob is not None and pytest.approx(token.logprob, abs=1e-4),
                    [top.token_id for top in token.top_logprobs],
                )
                for token in tokens
            ]

        return {name: await one(given) for name, given in FIELDS.items()}

    async with cluster(model_folder, tmp_path, replace(FP32, num_prefill=0)) as made:
        expected = await answers(made)
    async with cluster(model_folder, tmp_path, FP32) as made:
        assert await answers(made) == expected
    assert all(len(token[4]) == 5 and token[3] is not False for token in expected["logprobs"])
    assert {"stop", "length"} == {tokens[-1][2] for tokens in expected.values()}


async def test_each_cause_has_its_status(model_folder: Path, tmp_path: Path) -> None:
    """faults: cause -> status table, each with a message that says what to do."""
    body = {"model": "smol", "prompt": "Hello", "max_tokens": 4}
    plan = ClusterPlan(num_prefill=0, no_prefill_policy="refuse", max_model_len=64)
    async with cluster(model_folder, tmp_path, plan) as made, aiohttp.ClientSession() as session:
        url = f"http://{made.bound['http']}/v1/completions"

        async def status(**given: Any) -> tuple[int, str, str | None]:
            async with session.post(url, **given) as response:
                error = (await response.json())["error"]
                return response.status, error["message"], response.headers.get("Retry-After")

        code, message, retry = await status(json=body)
        assert (code, "prefill" in message, retry is not None) == (503, True, True)
        assert (await status(json={**body, "prompt": "word " * 100}))[0] == 400
        assert (await status(json={**body, "model": "other"}))[0] == 404
        assert (await status(data=b"{not json", headers={"Content-Type": "application/json"}))[0] == 400
        made.router.dispatcher.is_draining = True
        code, message, retry = await status(json=body)
        assert (code, "shutting down" in message, retry is not None) == (503, True, True)
        made.router.dispatcher.is_draining = False


async def test_counters_reconcile_over_finished_aborted_failed_and_rejected_requests(
    model_folder: Path, tmp_path: Path
) -> None:
    """faults: aborted, failed, rejected and finished requests."""
    async with cluster(model_folder, tmp_path) as made, aiohttp.ClientSession() as session:
        url = f"http://{made.bound['http']}/v1/completions"
        body = {"model": "smol", "prompt": "Hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        async with session.post(url, json=body) as response:
            assert (await response.json())["usage"]["completion_tokens"] == 4
        async with session.post(url, json={**body, "max_tokens": -1}) as response:
            assert response.status == 400
        async with session.post(url, json={**body, "max_tokens": 2000, "stream": True}) as response:
            await response.content.readline()
        registry = made.router.front.metrics.registry

        def counted(outcome: str) -> float:
            labels = {"model_name": "smol", "outcome": outcome}
            return registry.get_sample_value("pdserve_requests_total", labels) or 0.0

        await until(lambda: counted("abort") == 1)
        assert [counted(outcome) for outcome in ("stop", "length", "abort", "error", "rejected")] == [0, 1, 1, 0, 1]
        assert registry.get_sample_value("pdserve_requests_in_flight", {"model_name": "smol"}) == 0


async def test_random_bytes_at_every_port_harm_nobody(model_folder: Path, tmp_path: Path) -> None:
    """faults: random bytes on the transfer port."""
    async with cluster(model_folder, tmp_path) as made:
        addresses = [made.bound["http"], made.bound["grpc"], made.bound["fleet"]]
        for worker in made.router.fleet.workers:
            addresses += [worker.hello.grpc_address, worker.hello.transfer_address, worker.hello.metrics_address]
        for address in addresses:
            host, _, port = address.rpartition(":")
            for noise in (b"", b"\x00" * 4096, bytes(range(256)) * 64, b"GET / HTTP/1.1\r\n\r\n"):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(noise)
                writer.close()
        async with aclosing(made.stream(PROMPT, SamplingParams(max_tokens=4, temperature=0.0))) as batches:
            assert sum([len(batch) async for batch in batches]) > 0
