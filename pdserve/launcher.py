"""`pdserve serve`: a router and two pools of workers, up together and down together.

1. A private folder: cluster token, logs, Ray's session.
2. The router starts, a child of this process.
3. Ray is started here (or joined), and asked for an actor for each worker; they start in parallel.
4. The workers load their weights and report to the router; when all are ready, so is the server.
5. A worker that dies is started again by Ray. A router that dies ends everything.
6. The end: the router finishes what runs and takes nothing new, then the workers are drained, then Ray ends.
   Whatever is still there is killed; where this process is killed itself, the reaper does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from pdserve.child import ChildEnd, ChildSpec, WatchedChild
from pdserve.client import Client
from pdserve.config import RouterOptions, ServeOptions, WorkerOptions, model_name
from pdserve.errors import ClientError, LaunchFailed
from pdserve.models import Progress, print_progress, resolve_model
from pdserve.process import Watchlist
from pdserve.ray_session import RaySession, node_address
from pdserve.reaper import Reaper, keep_logs, users_of
from pdserve.worker_actor import ActorPlace, WorkerHandle
from pdserve_wire.auth import make_token_file, read_token
from pdserve_wire.deadlines import DEADLINES

_POLL_INTERVAL_S = 0.2  # of the router's status from outside, while the pools start
_PROGRESS_INTERVAL_S = 5.0
_LEFTOVERS_S = 5.0
_DRAIN_S = DEADLINES.drain_s + 5.0  # a child keeps the deadline itself; this is for one that doesn't
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a router serves: HOST:PORT."""

    http: str
    grpc: str
    fleet: str

    @property
    def url(self) -> str:
        """For a client on this machine."""
        host, _, port = self.http.rpartition(":")
        return f"http://{'127.0.0.1' if host in ('0.0.0.0', '[::]') else host}:{port}"


class Launcher:
    """`async with` it: the server is ready inside, and gone after. For one event loop.

    Raises `LaunchFailed`, `ModelNotFound`, `BadTokenFile` or OSError where it can't start.
    """

    def __init__(self, options: ServeOptions, progress: Progress = print_progress) -> None:
        self.addresses: Addresses
        self._options = options
        self._progress = progress
        self._started_at = time.monotonic()
        self._workers: list[WorkerHandle] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._router: WatchedChild | None = None
        self._is_ready = False
        self._is_ending = False

    async def __aenter__(self) -> Self:
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._folder = _private_folder()
        self._reaper = Reaper(self._folder)
        self._ray = RaySession(self._options, self._folder)
        try:
            await self._start()
        except BaseException as error:
            await self._end(is_failure=isinstance(error, Exception))
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self._end(is_failure=isinstance(error, LaunchFailed))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    async def wait_failed(self) -> None:
        """Returns never; raises `LaunchFailed` when the server can't go on."""
        await asyncio.shield(self._failed)

    def kill(self) -> None:
        """End the drain at once: what runs is lost."""
        self._progress("killing everything")
        if self._router is not None:
            self._router.kill()
        for worker in self._workers:
            worker.kill()

    async def _start(self) -> None:
        options = self._options
        model = await asyncio.to_thread(resolve_model, options.engine.model, self._progress)
        token_file = options.cluster_token_file or self._folder / "cluster-token"
        if options.cluster_token_file is None:
            make_token_file(token_file)
        token = read_token(token_file)
        router = self._start_router(model, token_file)
        self._progress(f"logs of the router and the workers: {self._folder}")
        self._progress(f"starting Ray{f' ({options.ray_address})' if options.ray_address else ' on this machine'}")
        num_threads = await self._unless_failed(self._ray.open())
        self.addresses = await self._router_addresses(router)
        self._progress(f"starting {options.num_workers} workers, threads each: {num_threads}")
        self._start_workers(model, token_file, token, num_threads)
        await self._unless_failed(self._until_ready(token))
        self._is_ready = True

    def _start_router(self, model: Path, token_file: Path) -> WatchedChild:
        options = self._options
        told = RouterOptions(
            model=str(model),
            served_model_name=self._model_name,
            max_model_len=options.engine.max_model_len,
            http=options.http,
            grpc=options.grpc,
            fleet="0.0.0.0:0" if options.ray_address else "127.0.0.1:0",
            cluster_token_file=token_file.absolute(),
            api_keys_file=options.api_keys_file,
            max_requests=options.max_requests,
            no_prefill_policy=options.no_prefill_policy,
        )
        arguments = ("-P", "-m", "pdserve.cli", "router", *told.arguments())
        log_file = self._folder / "router.log"
        self._router = WatchedChild(
            ChildSpec(
                "router", arguments, log_file, says_when_ready=True, drain_s=_DRAIN_S, environment=_environment(1)
            )
        )
        self._router.start()
        self._watch("router", self._follow_router(self._router))
        return self._router

    async def _router_addresses(self, router: WatchedChild) -> Addresses:
        async def bound() -> str:
            try:
                async with asyncio.timeout(DEADLINES.worker_start_s):
                    return await asyncio.wrap_future(router.ready)
            except TimeoutError as error:
                raise LaunchFailed(f"router: not ready after {DEADLINES.worker_start_s:g} s") from error

        return Addresses(**json.loads(await self._unless_failed(bound())))

    def _start_workers(self, model: Path, token_file: Path, token: str, num_threads: int) -> None:
        options = self._options
        is_on_any_node = options.ray_address is not None
        fleet = self.addresses.fleet
        if is_on_any_node:
            host = options.advertise or node_address()
            fleet = f"{host}:{fleet.rpartition(':')[2]}"
        bind = "0.0.0.0:0" if is_on_any_node else "127.0.0.1:0"
        for role, size in (("prefill", options.prefill), ("decode", options.decode)):
            for number in range(size):
                told = WorkerOptions(
                    engine=options.engine.with_model(
                        options.engine.model if is_on_any_node else str(model), num_threads
                    ),
                    role=role,
                    routers=(fleet,),
                    cluster_token_file=token_file.absolute(),
                    grpc=bind,
                    transfer=bind,
                    metrics=bind,
                    transport=options.transport,
                    served_model_name=self._model_name,
                    worker_id=f"{role}-{number}",
                    max_waiting=options.max_waiting,
                )
                spec = ChildSpec(
                    name=f"{role}-{number}",
                    arguments=("-P", "-m", "pdserve.cli", "worker", *told.arguments()),
                    log_file=self._folder / f"{role}-{number}.log",
                    environment=_environment(num_threads),
                    cluster_token=token if is_on_any_node else None,
                    drain_s=_DRAIN_S,
                )
                worker = WorkerHandle(spec, ActorPlace(num_cpus=num_threads, is_on_any_node=is_on_any_node))
                self._workers.append(worker)
                self._watch(worker.name, self._follow_worker(worker))

    @property
    def _model_name(self) -> str:
        return model_name(self._options.engine.model, self._options.served_model_name)

    async def _until_ready(self, token: str) -> None:
        """Look at the router until both pools are whole, and tell how far they are."""
        options = self._options
        told, told_at = "", 0.0
        async with Client(self.addresses.url, cluster_token=token) as client:
            while True:
                with contextlib.suppress(ClientError):
                    workers = (await client.status()).get("workers", [])
                    ready = [worker["role"] for worker in workers if worker["is_ready"]]
                    num_prefill, num_decode = ready.count("prefill"), ready.count("decode")
                    line = f"pools: {num_prefill}/{options.prefill} prefill, {num_decode}/{options.decode} decode ready"
                    if line != told or self.elapsed_s - told_at > _PROGRESS_INTERVAL_S:
                        told, told_at = line, self.elapsed_s
                        self._progress(f"{line} ({self.elapsed_s:.0f} s)")
                    if num_prefill >= options.prefill and num_decode >= options.decode:
                        return
                if self.elapsed_s > DEADLINES.worker_start_s:
                    raise LaunchFailed(f"not ready after {DEADLINES.worker_start_s:g} s: {told}")
                await asyncio.sleep(_POLL_INTERVAL_S)

    async def _follow_router(self, router: WatchedChild) -> None:
        end = await asyncio.wrap_future(router.ended)
        self._fail("router", end)

    async def _follow_worker(self, worker: WorkerHandle) -> None:
        """Tell of each of its deaths; one before the server is ready is a failure."""
        while True:
            pid = await worker.wait_started()
            self._progress(f"weights: {worker.name} loads them (process {pid}, {self.elapsed_s:.0f} s)")
            end = await worker.wait_ended()
            if self._is_ending:
                return
            if not self._is_ready:
                self._fail(worker.name, end)
            self._progress(f"{worker.name} {end.reason}; Ray starts it again")

    def _fail(self, name: str, end: ChildEnd) -> None:
        if not self._is_ending and not self._failed.done():
            self._failed.set_exception(LaunchFailed(f"{name} {end}"))

    def _watch(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        async def watch() -> None:
            try:
                await work
            except Exception as error:  # above all: Ray has given an actor up
                self._fail(name, ChildEnd(f"can't be watched: {error}", ""))

        self._tasks.append(asyncio.create_task(watch()))

    async def _unless_failed(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`, or `LaunchFailed` as soon as a part of the server has ended."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._failed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return await task
        finally:
            task.cancel()

    async def _end(self, is_failure: bool) -> None:
        self._is_ending = True
        if self._failed.done():
            self._failed.exception()  # it has been told
        if self._router is not None:
            if self._is_ready:
                self._progress("draining: running requests finish, new ones are refused")
            await asyncio.to_thread(self._router.stop)
        if self._workers:
            stops = [asyncio.create_task(worker.stop()) for worker in self._workers]
            await asyncio.wait(stops, timeout=_DRAIN_S + _LEFTOVERS_S)
            self._tasks += stops
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        left = Watchlist(users_of(self._folder))
        await asyncio.to_thread(self._ray.close)
        if killed := await asyncio.to_thread(left.end, _LEFTOVERS_S):
            self._progress(f"killed what did not end by itself: {', '.join(map(str, sorted(killed)))}")
        await asyncio.to_thread(self._reaper.dismiss)
        if is_failure and any(self._folder.glob("*.log")):
            keep_logs(self._folder)
            self._progress(f"logs are in {self._folder}")
        else:
            shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> Path:
    """Of this user only. Ray's sockets are in it, and a socket's path may have 107 characters."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="pdserve-", dir=parent if len(parent) <= 30 else "/tmp"))


def _environment(num_threads: int) -> dict[str, str]:
    """One team of threads a worker, no larger than its share of the cores: two teams on the same cores made each
    other's steps 3 to 30 times longer. How a team waits is left to OpenMP: on cores of its own a team that sleeps
    between operations (OMP_WAIT_POLICY=PASSIVE) took 1.7 times as long for a decode step as one that spins a while.
    """
    return {"OMP_NUM_THREADS": str(num_threads)}
