"""This process's connection to Ray: started here, or joined."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import ray

from pdserve.config import ServeOptions
from pdserve.errors import LaunchFailed
from pdserve.process import num_usable_cores

_OBJECT_STORE_NBYTES = 80_000_000  # Ray's least, nearly: nothing of ours is in it
_LOOPBACK = "127.0.0.1" if sys.platform == "darwin" else "127.0.0.2"  # Ray takes .1 to mean the outer address


def connect_ray(options: ServeOptions, folder: Path) -> int:
    """Start Ray with its session in `folder`, or join it. Returns the number of threads for each worker.

    Blocks for some seconds. Call it on the main thread: the kernel ends Ray when the thread that started it ends.
    Raises `LaunchFailed`.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with _own_sigterm_handler(), _translated(options.ray_address):
        if options.ray_address is None:
            return _start(options, folder)
        ray.init(address=options.ray_address, log_to_driver=False, logging_level=logging.ERROR)
        return options.engine.num_threads or _threads_on_nodes(options.num_workers)


def disconnect_ray() -> None:
    """End what `connect_ray` started; a cluster that was joined goes on. Blocks for a second or two."""
    ray.shutdown()


def node_address() -> str:
    """The address by which other nodes of the cluster reach this one."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _start(options: ServeOptions, folder: Path) -> int:
    num_threads = options.engine.num_threads or max(1, num_usable_cores() // options.num_workers)
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray keeps one in the home folder
    # No idle workers for tasks that never come, and no killing of our small actors for what others use.
    for name in ("enable_worker_prestart", "prestart_worker_first_driver", "memory_monitor_refresh_ms"):
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


@contextlib.contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """`ray.init` takes the handler of SIGTERM; it is given back."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
