"""`pdserve serve` as a person has it: one process to start, and none left when it has ended, whatever ended it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.client import Client
from pdserve.config import AskOptions
from pdserve.errors import ClientError
from pdserve.process import Watchlist, descendants

pytestmark = pytest.mark.timeout(240)

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONG_QUESTION = [{"role": "user", "content": "Tell me a long story about a dragon, with many details."}]
TIMEOUT_S = 90.0  # for what takes a tenth of it on a machine with nothing else to do
POLL_INTERVAL_S = 0.2


@dataclass
class Serve:
    """A running `pdserve serve`. Its progress goes to `log`."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def folder(self) -> Path:
        """Its private folder."""
        (line,) = [line for line in self.log.read_text().splitlines() if "logs of the router" in line]
        return Path(line.split()[-1])

    def end(self, number: signal.Signals) -> int:
        """Send the signal and wait; the exit code. Fails if anything that it started is left."""
        started = Watchlist(descendants(self.process.pid))
        self.process.send_signal(number)
        code = self.process.wait(TIMEOUT_S)
        left = started.wait(10.0)
        started.close()
        assert not left, [psutil.Process(pid).cmdline() for pid in left]
        return code

    def wait_logged(self, words: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while words not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(POLL_INTERVAL_S)

    async def ask(self) -> str:
        async with Client(self.url) as client, client.chat(QUESTION, AskOptions(max_tokens=16)) as reply:
            return "".join([text async for text in reply])

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Those that are ready, by name."""
        async with Client(self.url) as client:
            workers = (await client.status())["workers"]
        return {worker["worker_id"]: worker for worker in workers if worker["is_ready"]}

    async def wait_replaced(self, name: str, pid: int) -> None:
        """Until the worker is ready as another process."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                worker = (await self.workers()).get(name)
                if worker is not None and worker["pid"] != pid:
                    return
                await asyncio.sleep(POLL_INTERVAL_S)  # it is looked at from outside


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Serve]:
    command = [sys.executable, "-m", "pdserve.cli", "serve", "--http=127.0.0.1:0", "--grpc=127.0.0.1:0"]
    log = folder / "serve.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--kv-cache-gb=0.05", *words], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("ready: http://"), log.read_text()
        server = Serve(process, ready.split()[1], log)
        yield server
        shutil.rmtree(server.folder, ignore_errors=True)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Serve]:
    with serving(tmp_path_factory.mktemp("serve")) as server:
        yield server


async def test_it_answers_from_two_pools(server: Serve) -> None:
    assert await server.ask() == "The capital of France is Paris."
    assert {name: worker["role"] for name, worker in (await server.workers()).items()} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
    }


@pytest.mark.parametrize(("name", "number"), [("decode-0", signal.SIGKILL), ("prefill-0", signal.SIGSTOP)])
async def test_a_worker_that_is_killed_or_stopped_comes_back(server: Serve, name: str, number: signal.Signals) -> None:
    pid = (await server.workers())[name]["pid"]
    os.kill(pid, number)
    await server.wait_replaced(name, pid)
    assert await server.ask() == "The capital of France is Paris."
    assert f"{name} killed" in server.log.read_text()


async def test_sigterm_lets_a_request_finish_and_leaves_neither_process_nor_file(server: Serve) -> None:
    assert server.folder.is_dir()
    async with Client(server.url) as client, client.chat(LONG_QUESTION, AskOptions(max_tokens=48)) as reply:
        texts = aiter(reply)
        await anext(texts)
        ended = asyncio.create_task(asyncio.to_thread(server.end, signal.SIGTERM))
        num_texts = len([text async for text in texts])
    assert num_texts > 10
    assert reply.finish_reason == "length"
    assert await ended == 0
    assert not server.folder.exists()
    assert "draining" in server.log.read_text()
    assert "SIGTERM received" not in server.log.read_text()  # the words of Ray's own handler


async def test_a_second_signal_ends_it_at_once(tmp_path: Path, model_folder: Path) -> None:
    with serving(tmp_path, "--prefill=0") as server:
        async with Client(server.url) as client, client.chat(LONG_QUESTION, AskOptions(max_tokens=1000)) as reply:
            texts = aiter(reply)
            await anext(texts)
            server.process.send_signal(signal.SIGINT)
            await asyncio.to_thread(server.wait_logged, "draining")
            await asyncio.sleep(0.6)  # not the same press
            ended = asyncio.create_task(asyncio.to_thread(server.end, signal.SIGINT))
            with pytest.raises(ClientError):
                async for _ in texts:
                    pass
        assert await ended == 0
        assert not server.folder.exists()


def test_sigkill_leaves_no_process_and_only_logs(tmp_path: Path, model_folder: Path) -> None:
    with serving(tmp_path) as server:
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        assert {path.suffix for path in server.folder.iterdir()} == {".log"}


def test_without_its_router_it_ends(tmp_path: Path, model_folder: Path) -> None:
    with serving(tmp_path, "--prefill=0") as server:
        (router,) = (pid for pid in descendants(server.process.pid) if " router " in _command_line(pid))
        started = Watchlist(descendants(server.process.pid))
        os.kill(router, signal.SIGKILL)
        assert server.process.wait(TIMEOUT_S) == 1
        assert started.wait(10.0) == set()
        started.close()
        lines = server.log.read_text().splitlines()
    assert any(line.startswith("pdserve: router killed by SIGKILL") for line in lines)
    assert not any("Traceback" in line for line in lines)


def test_a_worker_that_cannot_start_ends_it_with_the_reason(model_folder: Path) -> None:
    words = ("--http=127.0.0.1:0", "--grpc=127.0.0.1:0", "--prefill=0", "--kv-cache-gb=0.000001")
    command = [sys.executable, "-m", "pdserve.cli", "serve", *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (run.returncode, run.stdout) == (1, "")
    assert "pdserve: decode-0 ended with exit code 1" in run.stderr
    assert "--kv-cache-gb 1e-06 holds 0 blocks" in run.stderr
    assert "Traceback" not in run.stderr
    (kept,) = [line for line in run.stderr.splitlines() if "logs are in" in line]
    folder = Path(kept.split()[-1])
    assert (folder / "decode-0.log").exists()
    shutil.rmtree(folder)


def _command_line(pid: int) -> str:
    return " ".join(psutil.Process(pid).cmdline())
