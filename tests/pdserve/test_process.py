"""Who descends from whom, who is left, and what the reaper does about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.process import Watchlist, descendants, num_usable_cores
from pdserve.reaper import Reaper, users_of

SLEEP = "import sys, time; print(flush=True); time.sleep(60)"


@contextmanager
def sleeping(code: str = SLEEP, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has said its first word."""
    with subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


@contextmanager
def using(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    code = "import sys, time; file = open(sys.argv[1], 'w'); print(flush=True); time.sleep(60)"
    with sleeping(code, str(folder / "router.log")) as process:
        yield process


def test_children_and_their_children_are_found() -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"
    with sleeping(code) as parent:
        assert len(descendants(parent.pid)) == 1
        assert descendants(os.getpid()) >= {parent.pid} | descendants(parent.pid)
        Watchlist(descendants(parent.pid)).end(0.0)


def test_a_watchlist_waits_for_the_end_and_names_who_is_left() -> None:
    with sleeping() as one, sleeping() as other:
        watchlist = Watchlist([one.pid, other.pid])
        assert watchlist.wait(0.0) == {one.pid, other.pid}
        one.kill()
        assert watchlist.wait(1.0) == {other.pid}
        other.kill()
        assert watchlist.wait(10.0) == set()
        watchlist.close()


def test_a_watchlist_kills_who_does_not_end() -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
    with sleeping(code) as process:
        assert Watchlist([process.pid]).end(0.1) == {process.pid}
        assert process.wait(10.0) == -signal.SIGKILL


def test_who_has_ended_before_is_no_concern() -> None:
    with sleeping() as process:
        process.kill()
        process.wait()
        assert Watchlist([process.pid]).end(0.0) == set()


def test_users_of_a_folder_are_those_with_a_file_of_it_open(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (tmp_path / "ab").mkdir()
    with using(folder) as process, using(tmp_path / "ab"):
        assert users_of(folder) == {process.pid}
    with (folder / "mine").open("w"):
        assert users_of(folder) == set()  # this process does not count


def test_the_reaper_ends_what_a_killed_process_leaves(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "cluster-token").write_text("secret")
    code = "import sys, time; from pathlib import Path; from pdserve.reaper import Reaper\n"
    code += "reaper = Reaper(Path(sys.argv[1])); print(reaper._process.pid, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with using(tmp_path) as left, subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        reaper = Watchlist([int(owner.stdout.readline())])
        owner.kill()
        assert left.wait(30.0) == -signal.SIGKILL
        assert reaper.wait(30.0) == set()
        reaper.close()
    assert [path.name for path in tmp_path.iterdir()] == ["router.log"]


def test_a_dismissed_reaper_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "cluster-token").write_text("secret")
    with using(tmp_path) as process:
        reaper = Reaper(tmp_path)
        started_at = time.monotonic()
        reaper.dismiss()
        assert time.monotonic() - started_at < 20.0
        assert process.poll() is None
    assert (tmp_path / "cluster-token").exists()


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= num_usable_cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 2, 3})
    monkeypatch.setattr(Path, "read_text", lambda *_: "200000 100000\n")
    assert num_usable_cores() == 2
    monkeypatch.setattr(Path, "read_text", lambda *_: "50000 100000\n")
    assert num_usable_cores() == 1
    monkeypatch.setattr(Path, "read_text", lambda *_: "max 100000\n")
    assert num_usable_cores() == 3
