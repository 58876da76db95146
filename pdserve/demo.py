"""`make demo`: two pools answer a question on this machine, and everything is put away again.

Exit code 0: the answer came, and no process is left.
"""

from __future__ import annotations

import asyncio
import os
import sys

from pdserve.ask import print_reply
from pdserve.client import Client
from pdserve.config import ChatOptions, EngineOptions, ServeOptions
from pdserve.errors import known_errors
from pdserve.launcher import Launcher
from pdserve.models import print_progress
from pdserve.process import Watchlist, descendants

QUESTION = "What is the capital of France?"


async def demo() -> int:
    """Start, ask, stop, look around; returns the exit code."""
    options = ServeOptions(http="127.0.0.1:0", grpc="127.0.0.1:0", engine=EngineOptions(kv_cache_gb=0.2))
    async with Launcher(options) as launcher:
        print_progress(f"ready: {launcher.addresses.url}, after {launcher.elapsed_s:.1f} s")
        started = Watchlist(descendants(os.getpid()))
        print(f"\nQ: {QUESTION}\nA: ", end="", flush=True)
        async with Client(launcher.addresses.url) as client:
            answer = await print_reply(client, ChatOptions(max_tokens=64, timeline=True), QUESTION)
        print()
        print_progress("stopping everything")
    left = started.wait(0.0)
    started.close()
    if left:
        print_progress(f"processes that are left: {sorted(left)}")
        return 1
    print_progress(f"stopped; no process is left ({launcher.elapsed_s:.1f} s in all)")
    return 0 if answer.strip() else 1


def main() -> int:
    try:
        return asyncio.run(demo())
    except KeyboardInterrupt:
        return 130
    except known_errors() as error:
        print_progress(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
