"""`pdserve serve` as a process: its signals, and its one line when it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time

from pdserve.config import ServeOptions, model_name
from pdserve.launcher import Launcher

_ONE_PRESS_S = 0.5  # some senders signal a process and its group: the same wish twice


def serve(options: ServeOptions) -> int:
    """Serve until SIGINT or SIGTERM; a second one kills what is left. Prints one line when ready."""
    return asyncio.run(_serve(options))


async def _serve(options: ServeOptions) -> int:
    out = sys.stdout
    launcher = Launcher(options)
    main = asyncio.current_task()
    assert main is not None
    first_signal_at: float | None = None

    def end() -> None:
        nonlocal first_signal_at
        now = time.monotonic()
        if first_signal_at is None:
            first_signal_at = now
            main.cancel()
        elif now - first_signal_at > _ONE_PRESS_S:
            launcher.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints what it has to say of dead actors
            async with launcher:
                print(_ready_line(launcher, options), file=out, flush=True)
                await launcher.wait_failed()
    except asyncio.CancelledError:
        if first_signal_at is None:
            raise
    return 0


def _ready_line(launcher: Launcher, options: ServeOptions) -> str:
    name = model_name(options.engine.model, options.served_model_name)
    pools = f"{options.prefill} prefill and {options.decode} decode"
    return (
        f"ready: {launcher.addresses.url} (OpenAI), {launcher.addresses.grpc} (gRPC); "
        f"{name}, {pools}, in {launcher.elapsed_s:.1f} s"
    )
