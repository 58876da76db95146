"""Ray, the real one, starts a worker again whatever ends it, and leaves it ended when that was asked for."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from ray.exceptions import RayActorError

from pdserve.config import EngineOptions, ServeOptions
from pdserve.process import Watchlist
from pdserve.ray_session import RaySession
from pdserve.worker_actor import ActorPlace, WorkerHandle
from tests.pdserve.makers import make_spec, pids_in

TIMEOUT_S = 40.0


@pytest.fixture(scope="module", autouse=True)
def ray_session() -> Iterator[None]:
    with TemporaryDirectory(prefix="pdserve-") as folder:
        session = RaySession(ServeOptions(engine=EngineOptions(num_threads=1), prefill=4), Path(folder))
        assert asyncio.run(session.open()) == 1
        yield
        session.close()


@asynccontextmanager
async def worker(folder: Path, mode: str = "beat", **changes: Any) -> AsyncIterator[WorkerHandle]:
    handle = WorkerHandle(make_spec(folder, mode, **changes), ActorPlace(num_cpus=1))
    async with asyncio.timeout(TIMEOUT_S):
        yield handle
        handle.kill()


async def assert_replaced(handle: WorkerHandle, pid: int, folder: Path) -> int:
    """A new child beats, the old one has ended, and no other was started."""
    new_pid = await handle.wait_started()
    assert pids_in(folder) == [pid, new_pid]
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return new_pid


async def test_a_killed_child_is_started_again_by_ray(tmp_path: Path) -> None:
    async with worker(tmp_path) as handle:
        pid = await handle.wait_started()
        os.kill(pid, signal.SIGKILL)
        assert (await handle.wait_ended()).reason == "killed by SIGKILL"
        await assert_replaced(handle, pid, tmp_path)


async def test_a_stopped_child_is_killed_and_started_again(tmp_path: Path) -> None:
    async with worker(tmp_path, beat_limit_s=1.0) as handle:
        pid = await handle.wait_started()
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        assert (await handle.wait_ended()).reason == "killed: no beat for 1 s"
        assert time.monotonic() - stopped_at < 10.0
        await assert_replaced(handle, pid, tmp_path)


async def test_a_killed_actor_takes_its_child_along_and_both_come_back(tmp_path: Path) -> None:
    async with worker(tmp_path) as handle:
        pid = await handle.wait_started()
        actor_pid = psutil.Process(pid).ppid()
        os.kill(actor_pid, signal.SIGKILL)
        assert (await handle.wait_ended()).reason == "its actor ended"
        new_pid = await assert_replaced(handle, pid, tmp_path)
        assert psutil.Process(new_pid).ppid() != actor_pid


async def test_stop_leaves_nothing_and_ray_starts_nothing(tmp_path: Path) -> None:
    async with worker(tmp_path) as handle:
        pid = await handle.wait_started()
        processes = Watchlist([pid, psutil.Process(pid).ppid()])
        await handle.stop()
        assert await asyncio.to_thread(processes.wait, TIMEOUT_S) == set()
        processes.close()
        with pytest.raises(RayActorError):
            await handle.wait_started()
        assert pids_in(tmp_path) == [pid]


async def test_a_child_that_fails_to_start_says_why(tmp_path: Path) -> None:
    async with worker(tmp_path, "fail") as handle:
        end = await handle.wait_ended()
        assert str(end) == "ended with exit code 1\npdserve: the weights are not there"


async def test_a_child_without_a_sign_of_life_says_so(tmp_path: Path) -> None:
    async with worker(tmp_path, "silent", start_limit_s=1.0) as handle:
        assert (await handle.wait_ended()).reason == "killed: no sign of life within 1 s"


async def test_a_worker_on_any_node_is_told_that_nodes_address_and_cleans_up_there(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, cluster_token="a-secret-of-many-characters")
    handle = WorkerHandle(spec, ActorPlace(num_cpus=1, is_on_any_node=True))
    async with asyncio.timeout(TIMEOUT_S):
        process = psutil.Process(await handle.wait_started())
        assert "--advertise=127.0.0.2" in process.cmdline()
        (log,) = {Path(file.path) for file in process.open_files() if file.path.endswith(".log")}
        assert log.exists()
        assert not (tmp_path / "child.log").exists()
        await handle.stop()
        assert not log.parent.exists()
