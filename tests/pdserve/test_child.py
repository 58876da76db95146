"""A child is watched from its start to its end, and ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.child import ChildSpec, WatchedChild
from pdserve.process import Watchlist
from tests.pdserve.makers import SCRIPT, make_spec, pids_in

TIMEOUT_S = 30.0


@contextmanager
def started(spec: ChildSpec) -> Iterator[WatchedChild]:
    child = WatchedChild(spec)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.ended.result(TIMEOUT_S)


def test_the_first_beat_means_that_it_has_started(tmp_path: Path) -> None:
    with started(make_spec(tmp_path)) as child:
        assert [child.started.result(TIMEOUT_S)] == pids_in(tmp_path)
        assert not child.ended.done()


def test_its_ready_line_is_passed_on(tmp_path: Path) -> None:
    with started(make_spec(tmp_path, says_when_ready=True)) as child:
        assert child.ready.result(TIMEOUT_S) == '{"http": "127.0.0.1:1"}\n'


def test_the_end_of_its_log_says_why_it_ended(tmp_path: Path) -> None:
    (tmp_path / "child.log").write_text("of an earlier run\n")
    with started(make_spec(tmp_path, "fail")) as child:
        end = child.ended.result(TIMEOUT_S)
    assert str(end) == "ended with exit code 1\npdserve: the weights are not there"
    assert not end.was_asked
    assert not child.started.done()


def test_a_program_that_is_not_there_is_an_end_too(tmp_path: Path) -> None:
    spec = ChildSpec("child", (str(tmp_path / "missing.py"),), tmp_path / "child.log")
    with started(spec) as child:
        assert "missing.py" in child.ended.result(TIMEOUT_S).log_tail
    with started(ChildSpec("child", (), tmp_path / "no folder" / "child.log")) as child:
        assert child.ended.result(TIMEOUT_S).reason.startswith("can't be started")


def test_a_killed_child_is_noticed_at_once(tmp_path: Path) -> None:
    with started(make_spec(tmp_path, beat_limit_s=60.0)) as child:
        os.kill(child.started.result(TIMEOUT_S), signal.SIGKILL)
        end = child.ended.result(10.0)
    assert (end.reason, end.was_asked) == ("killed by SIGKILL", False)


def test_a_stopped_child_is_killed_when_its_beats_are_missing(tmp_path: Path) -> None:
    with started(make_spec(tmp_path, beat_limit_s=1.0)) as child:
        os.kill(child.started.result(TIMEOUT_S), signal.SIGSTOP)
        stopped_at = time.monotonic()
        end = child.ended.result(TIMEOUT_S)
        assert 0.8 < time.monotonic() - stopped_at < 10.0
    assert end.reason == "killed: no beat for 1 s"


def test_a_child_that_never_beats_is_killed(tmp_path: Path) -> None:
    with started(make_spec(tmp_path, "silent", start_limit_s=1.0)) as child:
        assert child.ended.result(TIMEOUT_S).reason == "killed: no sign of life within 1 s"


def test_stop_ends_it_politely(tmp_path: Path) -> None:
    with started(make_spec(tmp_path)) as child:
        child.started.result(TIMEOUT_S)
        end = child.stop()
        assert (end.reason, end.was_asked) == ("killed by SIGTERM", True)
        assert child.stop() == end


def test_stop_kills_what_does_not_drain_in_time(tmp_path: Path) -> None:
    with started(make_spec(tmp_path, "deaf", drain_s=0.5)) as child:
        child.started.result(TIMEOUT_S)
        assert child.stop().reason == "killed by SIGKILL"


def test_stop_before_the_start_starts_nothing(tmp_path: Path) -> None:
    child = WatchedChild(make_spec(tmp_path))
    child.kill()
    child.start()
    assert child.ended.result(TIMEOUT_S).was_asked
    assert pids_in(tmp_path) == []


def test_the_token_is_handed_over_without_a_file_that_stays(tmp_path: Path) -> None:
    token = "a-secret-of-many-characters"
    with started(make_spec(tmp_path, "token", cluster_token=token)) as child:
        pid = child.started.result(TIMEOUT_S)
        command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert (tmp_path / "token").read_text() == token
    assert token.encode() not in command_line


def test_it_is_told_its_environment_and_nothing_of_ray(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, environment={"OMP_NUM_THREADS": "3"})
    os.environ["RAY_TEST_WORD"] = "x"
    try:
        with started(spec) as child:
            environ = Path(f"/proc/{child.started.result(TIMEOUT_S)}/environ").read_bytes().split(b"\0")
    finally:
        del os.environ["RAY_TEST_WORD"]
    assert b"OMP_NUM_THREADS=3" in environ
    assert not [word for word in environ if word.startswith(b"RAY_")]


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from pdserve.child import ChildSpec, WatchedChild\n"
        f"spec = ChildSpec('child', ({str(SCRIPT)!r}, {str(tmp_path)!r}), Path({str(tmp_path / 'child.log')!r}))\n"
        "child = WatchedChild(spec); child.start(); print(child.started.result(), flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = Watchlist([int(parent.stdout.readline())])
        parent.kill()
    assert child.wait(TIMEOUT_S) == set()
    child.close()
