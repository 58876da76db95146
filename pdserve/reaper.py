"""Ends what a killed `serve` leaves behind. A process of its own: `python -m pdserve.reaper FOLDER`.

When `serve` is killed, the kernel ends the router, Ray and the workers with it; but Ray's agents are nobody's
children then, and were seen to wait for a minute or more. All of them keep files of the private folder open. The
reaper is told of the end by its stdin, which only `serve` holds open: "done" when there is nothing to do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from pdserve.process import Watchlist

_GIVE_UP_S = 30.0
_DONE = b"done"


class Reaper:
    """The reaper's handle in `serve`."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-P", "-m", "pdserve.reaper", str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def dismiss(self) -> None:
        """All is put away. Blocks until the reaper has ended."""
        try:
            self._process.communicate(_DONE)
        except BrokenPipeError:
            pass  # somebody has killed it


def users_of(folder: Path) -> set[int]:
    """The processes, this one aside, that have a file in `folder` open. Empty where there is no /proc."""
    inside = f"{folder}/"
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = [os.readlink(fd) for fd in (process / "fd").iterdir()]
        except OSError:
            continue  # it has ended, or is not ours
        if any(file.startswith(inside) for file in files):
            found.add(int(process.name))
    return found - {os.getpid()}


def keep_logs(folder: Path) -> None:
    """Remove all but the logs of the router and the workers."""
    shutil.rmtree(folder / "ray", ignore_errors=True)
    (folder / "cluster-token").unlink(missing_ok=True)


def main(folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == _DONE:
        return
    deadline = time.monotonic() + _GIVE_UP_S
    while (pids := users_of(folder)) and time.monotonic() < deadline:
        Watchlist(pids).end(timeout_s=0.0)
    keep_logs(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
