"""`pdserve run`: one prompt, one engine, this process."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from contextlib import aclosing

from engine.sampling import SamplingParams
from pdserve.config import RunOptions, model_name
from pdserve.models import print_progress, resolve_model


def run(options: RunOptions, prompt: str, is_raw: bool) -> int:
    """Stream the answer to stdout; how it goes, to stderr."""
    return asyncio.run(_run(options, prompt, is_raw))


async def _run(options: RunOptions, prompt: str, is_raw: bool) -> int:
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=secrets.randbits(63) if options.seed is None else options.seed,
    )
    sampling.validate()
    resolve_model(options.engine.model)  # a wrong name is told before what takes seconds
    from pdserve.local import LocalModel

    started_at = time.monotonic()
    print_progress(f"loading {model_name(options.engine.model, None)}")
    model = await asyncio.to_thread(LocalModel.load, options.engine)
    print_progress(f"loaded in {time.monotonic() - started_at:.1f} s")
    async with model:
        pieces = (
            model.complete(prompt, sampling) if is_raw else model.chat([{"role": "user", "content": prompt}], sampling)
        )
        async with aclosing(pieces):
            async for text in pieces:
                sys.stdout.write(text)
                sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
