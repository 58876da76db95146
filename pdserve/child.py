"""A child process that is watched by its beats, and ends with its parent.

1. It is started by a thread that stays until it has ended: on Linux the kernel kills a child that
   asked for it (`--die-with-parent`) when the thread that started it ends.
2. It writes a byte to `--beat-fd` each second. Silence for longer than the limit: SIGKILL.
3. `stop` asks it to drain (SIGTERM) and kills it when the time is up.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pdserve_wire.deadlines import DEADLINES

_TAIL_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start, and how long to wait for it. Durations are seconds."""

    name: str
    arguments: tuple[str, ...]  # for this Python
    log_file: Path  # appended to
    environment: Mapping[str, str] = field(default_factory=dict)  # beside what the parent has
    cluster_token: str | None = None  # handed over as `--cluster-token-file`, without a file that others could find
    says_when_ready: bool = False  # a line on `--ready-fd`
    start_limit_s: float = DEADLINES.worker_start_s  # until the first beat
    beat_limit_s: float = DEADLINES.peer_timeout_s  # between two beats
    drain_s: float = DEADLINES.drain_s


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """How a child ended. `was_asked`: by `stop`."""

    reason: str
    log_tail: str
    was_asked: bool = False

    def __str__(self) -> str:
        return f"{self.reason}\n{self.log_tail}".rstrip()


class WatchedChild:
    """One run of one child. The futures are completed by its thread and can't be cancelled.

    started: its process id, at the first beat. ready: its ready line. ended: how. The first two may never come.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.started: Future[int] = Future()
        self.ready: Future[str] = Future()
        self.ended: Future[ChildEnd] = Future()
        for future in (self.started, self.ready, self.ended):
            future.set_running_or_notify_cancel()
        self._spec = spec
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # between the start of the process and `stop`
        self._thread = threading.Thread(target=self._run, name=f"watch {spec.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> ChildEnd:
        """Ask the child to drain, wait for it, kill it when the time is up. Blocks; may be called more than once."""
        with self._lock:
            self._stopping.set()
            if self._process is not None:
                self._process.terminate()
        try:
            return self.ended.result(self._spec.drain_s)
        except TimeoutError:
            self.kill()
        return self.ended.result()

    def kill(self) -> None:
        """End the child at once; `ended` comes right after."""
        with self._lock:
            self._stopping.set()
            if self._process is not None:
                self._process.kill()

    def _run(self) -> None:
        try:
            end = self._start_and_watch()
        except OSError as error:
            end = ChildEnd(f"can't be started: {error}", "")
        self.ended.set_result(end)

    def _start_and_watch(self) -> ChildEnd:
        spec = self._spec
        with spec.log_file.open("ab") as log, _Pipe() as beats, _Pipe() as ready:
            log_start = log.tell()
            with self._lock:
                if self._stopping.is_set():
                    return ChildEnd("stopped before its start", "", was_asked=True)
                self._process = process = _start(spec, log.fileno(), beats.write_fd, ready.write_fd)
            beats.close_write()
            ready.close_write()
            try:
                silence = self._watch(process, beats.read_fd, ready.read_fd)
            finally:
                if process.poll() is None:
                    process.kill()
                code = process.wait()
        reason = f"killed: {silence}" if silence else _describe(code)
        return ChildEnd(reason, _tail(spec.log_file, log_start), self._stopping.is_set())

    def _watch(self, process: subprocess.Popen[bytes], beat_fd: int, ready_fd: int) -> str | None:
        """Return when the process has ended (None), or must be killed (why)."""
        spec = self._spec
        ready_line = b""
        limit_s, what = spec.start_limit_s, f"no sign of life within {spec.start_limit_s:g} s"
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector, _exit_fd(process) as exit_fd:
            selector.register(beat_fd, selectors.EVENT_READ)
            selector.register(ready_fd, selectors.EVENT_READ)
            if exit_fd is not None:
                selector.register(exit_fd, selectors.EVENT_READ)
            while True:
                readable = {key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
                if ready_fd in readable:
                    got = os.read(ready_fd, 4096)
                    ready_line += got
                    if not got or b"\n" in ready_line:
                        selector.unregister(ready_fd)
                    if b"\n" in ready_line:
                        self.ready.set_result(ready_line.decode())
                if beat_fd in readable:
                    if os.read(beat_fd, 4096):
                        if not self.started.done():
                            self.started.set_result(process.pid)
                        limit_s, what = spec.beat_limit_s, f"no beat for {spec.beat_limit_s:g} s"
                        deadline = time.monotonic() + limit_s
                    else:  # closed: it is ending
                        selector.unregister(beat_fd)
                if process.poll() is not None:
                    return None
                if not readable:
                    return what


class _Pipe:
    """A pipe whose ends are closed at the end of a `with`."""

    def __enter__(self) -> _Pipe:
        self.read_fd, self.write_fd = os.pipe()
        self._open = {self.read_fd, self.write_fd}
        return self

    def close_write(self) -> None:
        self._close(self.write_fd)

    def __exit__(self, *_: object) -> None:
        for fd in list(self._open):
            self._close(fd)

    def _close(self, fd: int) -> None:
        self._open.discard(fd)
        os.close(fd)


@contextmanager
def _exit_fd(process: subprocess.Popen[bytes]) -> Iterator[int | None]:
    """A descriptor that is readable once the process has ended, or None where the system has none."""
    if sys.platform != "linux":
        yield None
        return
    fd = os.pidfd_open(process.pid)
    try:
        yield fd
    finally:
        os.close(fd)


def _start(spec: ChildSpec, log_fd: int, beat_fd: int, ready_fd: int) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, *spec.arguments, f"--beat-fd={beat_fd}", "--die-with-parent"]
    fds = [beat_fd]
    if spec.says_when_ready:
        arguments.append(f"--ready-fd={ready_fd}")
        fds.append(ready_fd)
    with tempfile.TemporaryFile() as token_file:
        if spec.cluster_token is not None:
            token_file.write(spec.cluster_token.encode() + b"\n")
            token_file.flush()
            arguments.append(f"--cluster-token-file=/dev/fd/{token_file.fileno()}")
            fds.append(token_file.fileno())
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            env={**_own_environment(), "PYTHONUNBUFFERED": "1", **spec.environment},
            pass_fds=fds,
            process_group=0,  # a terminal's Ctrl-C is for the parent, which drains
        )


def _own_environment() -> dict[str, str]:
    """Ours, without what Ray tells its own processes: a child of a Ray actor is no part of Ray."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _tail(path: Path, start: int) -> str:
    """The last lines that were written to `path` after its first `start` bytes."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - _TAIL_NBYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-20:])
