"""This process's connection to Ray: started here, or joined."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import ray

from pdserve.config import ServeOptions
from pdserve.errors import LaunchFailed
from pdserve.process import num_usable_cores

_OBJECT_STORE_NBYTES = 80_000_000  # Ray's least, nearly: nothing of ours is in it
_LOOPBACK = "127.0.0.1" if sys.platform == "darwin" else "127.0.0.2"  # Ray takes .1 to mean the outer address
_SETTINGS = (  # each is 0 here
    "enable_worker_prestart",  # processes for tasks that never come
    "prestart_worker_first_driver",
    "memory_monitor_refresh_ms",  # it would kill our small actors for the memory that others use
    "worker_niceness",  # 15, and the child of an actor inherits it
)


class RaySession:
    """From `open` to `close` this process is a driver of Ray, started here or joined.

    Ray is started by a thread that stays: the kernel ends Ray's processes when the thread that started them ends.
    """

    def __init__(self, options: ServeOptions, folder: Path) -> None:
        """Ray's own files go to `folder`."""
        self._options = options
        self._folder = folder
        self._opened: Future[int] = Future()
        self._opened.set_running_or_notify_cancel()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray session", daemon=True)

    async def open(self) -> int:
        """Takes some seconds. Returns the number of threads for each worker. Raises `LaunchFailed`."""
        self._thread.start()
        try:
            return await asyncio.wrap_future(self._opened)
        finally:
            _take_back_sigterm()

    def close(self) -> None:
        """End what was started; a cluster that was joined goes on. Blocks for a second or two."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._opened.set_result(_connect(self._options, self._folder))
        except Exception as error:
            self._opened.set_exception(error)
        self._closing.wait()
        ray.shutdown()


def node_address() -> str:
    """The address by which other nodes of the cluster reach this one."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _connect(options: ServeOptions, folder: Path) -> int:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    logging.getLogger("ray").setLevel(logging.ERROR)
    with _translated(options.ray_address):
        if options.ray_address is None:
            return _start(options, folder)
        ray.init(address=options.ray_address, log_to_driver=False, logging_level=logging.ERROR)
        return options.engine.num_threads or _threads_on_nodes(options.num_workers)


def _start(options: ServeOptions, folder: Path) -> int:
    num_threads = options.engine.num_threads or max(1, num_usable_cores() // options.num_workers)
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray keeps one in the home folder
    for name in _SETTINGS:
        os.environ.setdefault(f"RAY_{name}", "0")
    ray.init(
        address="local",
        num_cpus=num_threads * options.num_workers,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_NBYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address=_LOOPBACK,
        _temp_dir=str(folder / "ray"),
    )
    return num_threads


def _take_back_sigterm() -> None:
    """Ray's C++ puts a handler of its own, which prints a stack, in front of Python's."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


@contextlib.contextmanager
def _translated(address: str | None) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        what = f"--ray-address {address}: can't be joined" if address else "Ray can't be started on this machine"
        raise LaunchFailed(f"{what}: {str(error).partition(chr(10))[0]}") from error


def _threads_on_nodes(num_workers: int) -> int:
    """Each worker's share of the smallest node, were they spread evenly."""
    num_cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    with_cpus = [number for number in num_cpus if number > 0]
    if not with_cpus:
        raise RuntimeError("the cluster has no node with CPUs")
    return max(1, min(with_cpus) // -(-num_workers // len(with_cpus)))
