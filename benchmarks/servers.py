"""The servers that are compared: how each is started, known to be ready, and stopped. All on this machine.

one-engine   ours, one worker that does both, on all cores
pools        ours, a prefill and a decode worker, the cores shared out
vllm         vLLM on the CPU, one process that computes on all cores (peers/vllm_cpu.sh)
vllm-auto    the same as it comes: one core computes, one is kept for its other processes
llama.cpp    llama.cpp with weights of 4 bits, where ours and vLLM's have 16 (peers/llama_cpp.sh)
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.machine import memory_gb
from pdserve.models import resolve_model
from pdserve.process import Watchlist, descendants

START_LIMIT_S = 600.0
_STOP_LIMIT_S = 60.0
_PEERS = Path(__file__).parent / "peers"


class NotInstalled(Exception):
    """This machine doesn't have the peer; the message says how to get it."""


class NotStarted(Exception):
    """The server ended or did not answer in time; after its first line the message has the end of the log."""


@dataclass(frozen=True, slots=True)
class Server:
    """How to start one. `PORT` and `MODEL` in the command stand for a free port and the model's folder."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def peer(self) -> Path | None:
        """The script of a foreign server, or None for ours."""
        return _PEERS / self.command[0] if self.command[0].endswith(".sh") else None

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*words, shlex.join(self.command)])


_POOLS = ("pdserve", "serve", "--http", "127.0.0.1:PORT", "--grpc", "127.0.0.1:0")
_VLLM = ("vllm_cpu.sh", "start", "MODEL", "PORT")
SERVERS: Mapping[str, Server] = {
    server.name: server
    for server in (
        Server("one-engine", (*_POOLS, "--prefill", "0", "--decode", "1", "MODEL")),
        Server("pools", (*_POOLS, "--prefill", "1", "--decode", "1", "MODEL")),
        Server("vllm", _VLLM),
        Server("vllm-auto", _VLLM, {"VLLM_CPU_OMP_THREADS_BIND": "auto"}),
        Server("llama.cpp", ("llama_cpp.sh", "start", "PORT")),
    )
}


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    pid: int  # all its processes descend from this one
    ready_s: float

    @property
    def pids(self) -> set[int]:
        return {self.pid} | descendants(self.pid)

    @property
    def memory_gb(self) -> float | None:
        return memory_gb(self.pids)


def why_missing(server: Server) -> str | None:
    """What keeps this server from being started here, or None."""
    if server.peer is None:
        return None
    done = subprocess.run([server.peer, "installed"], stderr=subprocess.PIPE, text=True)
    return done.stderr.strip() or None


@contextmanager
def running(server: Server) -> Iterator[RunningServer]:
    """A server that answers; stopped after. Raises `NotInstalled` or `NotStarted`."""
    if reason := why_missing(server):
        raise NotInstalled(reason)
    model, port = resolve_model("bundled"), _free_port()
    command = [word.replace("PORT", str(port)).replace("MODEL", str(model)) for word in server.command]
    start = _start_ours if server.peer is None else _start_peer
    with (
        tempfile.NamedTemporaryFile(prefix=f"bench-{server.name}-", suffix=".log") as log,
        start(command, {**os.environ, **server.environment}, Path(log.name)) as (pid, ready_s),
    ):
        yield RunningServer(f"http://127.0.0.1:{port}", pid, ready_s)


@contextmanager
def _start_ours(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[tuple[int, float]]:
    """It prints a line when it is ready, and ends with all that it started on SIGTERM."""
    program = Path(sys.executable).with_name(command[0])
    started_at = time.monotonic()
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [program, *command[1:]], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file
        ) as process,
    ):
        try:
            assert process.stdout is not None
            if not re.match(rb"ready: ", process.stdout.readline()):
                process.wait(_STOP_LIMIT_S)
                raise NotStarted(f"did not start\n{_tail(log)}")
            yield process.pid, time.monotonic() - started_at
        finally:
            processes = Watchlist({process.pid} | descendants(process.pid))
            process.terminate()
            if killed := processes.end(_STOP_LIMIT_S):
                print(f"{command[0]}: {len(killed)} processes did not end and were killed", file=sys.stderr)


@contextmanager
def _start_peer(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[tuple[int, float]]:
    script, started_at = _PEERS / command[0], time.monotonic()
    environment = {**environment, "PEER_LOG": str(log), "PEER_START_S": str(int(START_LIMIT_S))}
    with subprocess.Popen([script, *command[1:]], env=environment, stdout=subprocess.PIPE, text=True) as starting:
        try:
            pid = starting.communicate()[0].strip()
        except BaseException:
            starting.terminate()  # it stops what it started
            raise
    if starting.returncode != 0:
        raise NotStarted(f"did not start\n{_tail(log)}")
    try:
        yield int(pid), time.monotonic() - started_at
    finally:
        subprocess.run([script, "stop", pid], check=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def end_on_sigterm() -> None:
    """Let a SIGTERM to this process stop the server, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
