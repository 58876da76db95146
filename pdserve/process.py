"""Processes as the system sees them: who descends from whom, and who is left. For Linux."""

from __future__ import annotations

import os
import select
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


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
    """Processes that must end. Holds a descriptor of each, so that a process id used again is no confusion."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._fds: dict[int, int] = {}  # descriptor -> process id
        for pid in pids:
            try:
                self._fds[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                pass  # it has ended

    def wait(self, timeout_s: float) -> set[int]:
        """Blocks until all have ended or the time is up; the ids of those that are left."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        left = dict(self._fds)
        while left:
            ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ended:
                break
            for fd, _ in ended:
                poll.unregister(fd)
                del left[fd]
        return set(left.values())

    def kill(self) -> None:
        """SIGKILL to those that are left."""
        for fd in self._fds:
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
