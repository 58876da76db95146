"""How a child process of ours lives: it dies with its parent, beats while its loop runs, and drains
on SIGTERM."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys

from pdserve_wire.deadlines import DEADLINES

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Linux: be killed when the parent's thread that started us ends. Elsewhere: nothing."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def setup_logging(name: str) -> None:
    """One line an event on stderr: time, level, process, message."""
    logging.basicConfig(
        level=os.environ.get("PDSERVE_LOG", "INFO").upper(),
        format=f"%(asctime)s %(levelname).1s {name} %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    for noisy in ("aiohttp.access", "asyncio", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


async def beat(fd: int) -> None:
    """Write one byte each second while the event loop lives, until cancelled. A reader that is gone was the
    parent: then this process ends at once (it may have asked to die with its parent too late)."""
    os.set_blocking(fd, False)
    while True:
        try:
            os.write(fd, b".")
        except BlockingIOError:
            pass  # the reader is slow; it has enough to read
        except BrokenPipeError:
            os._exit(1)
        await asyncio.sleep(DEADLINES.beat_interval_s)


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
