"""A router freezes or dies with streams open: the workers give back what they held for it, and serve again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pdserve_pb import worker_pb2 as pb
from pdserve_pb import worker_pb2_grpc as pb_grpc
from pdserve_wire.auth import make_token_file, read_token, token_metadata
from pdserve_wire.channel import make_channel

FLEET = "127.0.0.1:47613"  # fixed: a router that starts again must be found where the first one was


def start(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pdserve.cli", *arguments],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


async def json_of(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url) as response:
        answer: dict[str, Any] = await response.json()
    return answer


async def num_leases(address: str, token: str) -> int:
    """What a worker itself says, whatever its routers do."""
    channel = make_channel(address)
    response = await pb_grpc.ControlStub(channel).Ledger(pb.LedgerRequest(), metadata=token_metadata(token), timeout=5)
    await channel.close(None)
    ledger = json.loads(response.json)
    used = ledger["num_blocks"] - ledger["states"]["free"]
    return int(ledger["requests"]["leases"]) + used


@pytest.mark.timeout(240)
async def test_a_router_that_freezes_or_dies_loses_its_leases_and_the_next_request_works(
    model_folder: Path, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    make_token_file(token_file)
    common = ("--model", str(model_folder), "--served-model-name", "smol", "--cluster-token-file", str(token_file))
    router_arguments = ("router", *common, "--http", "127.0.0.1:47611", "--grpc", "127.0.0.1:47612", "--fleet", FLEET)
    router = start(tmp_path, "router", *router_arguments)
    processes = [router]
    for role in ("prefill", "decode"):
        processes.append(
            start(tmp_path, role, "worker", *common, "--role", role, "--router", FLEET, "--worker-id", role)
        )
    url = "http://127.0.0.1:47611"
    body = {"model": "smol", "prompt": "Hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:

            async def is_up() -> bool:
                try:
                    status = await json_of(session, f"{url}/debug/status")
                except aiohttp.ClientError:
                    return False
                return sum(worker["is_ready"] for worker in status["workers"]) == 2

            async def wait_up() -> dict[str, str]:
                async with asyncio.timeout(90):
                    while not await is_up():
                        await asyncio.sleep(0.2)
                status = await json_of(session, f"{url}/debug/status")
                return {worker["role"]: worker["grpc_address"] for worker in status["workers"]}

            for kind in (signal.SIGSTOP, signal.SIGKILL):
                addresses = await wait_up()
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    await response.content.readline()
                    router.send_signal(kind)
                    for address in addresses.values():
                        async with asyncio.timeout(12):
                            while await num_leases(address, read_token(token_file)):
                                await asyncio.sleep(0.1)
                if kind is signal.SIGSTOP:
                    router.send_signal(signal.SIGCONT)
                else:
                    router.wait()
                    processes[0] = router = start(tmp_path, "router", *router_arguments)
                await wait_up()
                async with session.post(
                    f"{url}/v1/completions", json={**body, "max_tokens": 3, "stream": False}
                ) as last:
                    assert (await last.json())["usage"]["completion_tokens"] == 3
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
