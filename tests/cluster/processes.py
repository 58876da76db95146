"""A router on the test's loop and workers as processes, so that workers can be killed and stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from engine.sampling import SamplingParams
from pdserve.config import RouterOptions
from pdserve.router_process import RouterServer
from pdserve_wire.auth import make_token_file, read_token
from pdserve_wire.messages import Token
from pdserve_wire.timeline import RequestTimeline
from router.fleet import Worker
from router.generation import GenerationRequest
from router.served_model import ServedModel
from tests.cluster.makers import GREEDY, until

START_DEADLINE_S = 90.0
LEDGER_DEADLINE_S = 20.0


@dataclass(slots=True)
class ProcessCluster:
    """Workers are named `prefill-0`, `decode-1` and so on."""

    router: RouterServer
    folder: Path
    token_file: Path
    fleet: str
    log_folder: Path
    options: tuple[str, ...]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    timelines: dict[str, RequestTimeline] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start (again) a worker process; its log is kept beside the token."""
        role = name.partition("-")[0]
        arguments = ["worker", "--role", role, "--router", self.fleet, "--worker-id", name, "--model", str(self.folder)]
        arguments += ["--cluster-token-file", str(self.token_file), "--served-model-name", "smol", *self.options]
        with (self.log_folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "pdserve.cli", *arguments],
                stderr=log,
                stdout=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    async def wait_ready(self, *names: str) -> None:
        """Until the router may send requests to these workers, each in its present process."""

        def is_ready(name: str) -> bool:
            worker = self.worker(name)
            return worker is not None and worker.is_ready and worker.hello.pid == self.processes[name].pid

        await until(lambda: all(map(is_ready, names)), START_DEADLINE_S)

    def worker(self, name: str) -> Worker | None:
        return next((worker for worker in self.router.fleet.workers if worker.worker_id == name), None)

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    async def revive(self, name: str, number: signal.Signals) -> None:
        """Undo a SIGKILL or a SIGSTOP, and wait until the worker is back."""
        if number is signal.SIGSTOP:
            self.signal(name, signal.SIGCONT)
        else:
            self.processes[name].wait()
            self.start(name)
        await self.wait_ready(name)

    def stream(
        self, token_ids: list[int], sampling: SamplingParams, request_id: str
    ) -> AsyncGenerator[tuple[Token, ...], None]:
        timeline = self.timelines[request_id] = RequestTimeline(request_id)
        request = GenerationRequest(request_id, tuple(token_ids), sampling, timeout_s=90.0)
        return self.router.dispatcher.generate(request, timeline)

    async def token_ids(self, prompt: list[int], sampling: SamplingParams = GREEDY, request_id: str = "") -> list[int]:
        async with aclosing(self.stream(prompt, sampling, request_id or f"r{len(self.timelines)}")) as batches:
            return [token.token_id async for batch in batches for token in batch]

    async def ledger(self, name: str) -> dict[str, Any]:
        worker = self.worker(name)
        assert worker is not None, f"{name} is not here"
        return cast("dict[str, Any]", json.loads(await worker.client.ledger()))

    async def assert_no_leaks(self, *names: str) -> None:
        """All blocks of these workers are free and nothing is open, in bounded time."""
        for name in names:
            ledger: dict[str, Any] = {}
            try:
                async with asyncio.timeout(LEDGER_DEADLINE_S):
                    while (
                        not ledger
                        or ledger["states"]["free"] != ledger["num_blocks"]
                        or any(ledger["requests"].values())
                    ):
                        ledger = await self.ledger(name)
                        await asyncio.sleep(0.02)
            except TimeoutError:
                raise AssertionError(f"{name}: {ledger}") from None


@asynccontextmanager
async def process_cluster(
    folder: Path, tmp_path: Path, workers: tuple[str, ...], options: tuple[str, ...] = ()
) -> AsyncIterator[ProcessCluster]:
    token_file = tmp_path / "token"
    make_token_file(token_file)
    router_options = RouterOptions(
        model=str(folder), http="127.0.0.1:0", grpc="127.0.0.1:0", fleet="127.0.0.1:0", cluster_token_file=token_file
    )
    router = RouterServer(router_options, ServedModel.load(folder, "smol"), read_token(token_file))
    async with router.serving() as bound:
        made = ProcessCluster(router, folder, token_file, bound["fleet"], tmp_path, options)
        try:
            for name in workers:
                made.start(name)
            await made.wait_ready(*workers)
            yield made
        finally:
            for process in made.processes.values():
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
