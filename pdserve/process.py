"""Processes as the system sees them: who descends from whom, and who is left. For Linux."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

_KILLED_S = 5.0  # what was killed ends at once, unless the kernel is busy with it


def num_usable_cores() -> int:
    """Cores that this process may use: of its affinity and its control group."""
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return num_cores
    return num_cores if quota == "max" else max(1, min(num_cores, int(quota) // int(period)))


def descendants(pid: int) -> set[int]:
    """All processes below `pid`. Empty where there is no /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue  # it has ended
        parent = int(stat.rpartition(")")[2].split()[1])
        children[parent].append(int(folder.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = set(children[waiting.pop()]) - found
        found |= new
        waiting.extend(new)
    return found


class Watchlist:
    """Processes that must end. Holds a descriptor of each, so that an id that is used again confuses nobody."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids: dict[int, int] = {}  # by descriptor
        for pid in pids:
            try:
                self._pids[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                pass  # it has ended

    def wait(self, timeout_s: float) -> set[int]:
        """Blocks until all have ended or the time is up; the ids of those that are left."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        left = dict(self._pids)
        for fd in left:
            poll.register(fd, select.POLLIN)
        while left and (ended := poll.poll(max(0.0, deadline - time.monotonic()) * 1000)):
            for fd, _ in ended:
                poll.unregister(fd)
                del left[fd]
        return set(left.values())

    def end(self, timeout_s: float) -> set[int]:
        """Wait so long, kill those that are left, and close; the ids of those that had to be killed."""
        left = self.wait(timeout_s)
        for fd, pid in self._pids.items():
            if pid in left:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        self.wait(_KILLED_S)
        self.close()
        return left

    def close(self) -> None:
        for fd in self._pids:
            os.close(fd)
        self._pids.clear()
