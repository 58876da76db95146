"""Shows on a running server that KV blocks leave the prefill worker before it has read the whole prompt.

python -m benchmarks.timeline --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from benchmarks.prompts import Prompts


async def fetch_timeline(url: str, model: str, num_tokens: int) -> Mapping[str, Any]:
    """Where the time of one request with a fresh prompt of about `num_tokens` went."""
    request_id = f"timeline-{uuid.uuid4().hex}"
    body = {"model": model, "prompt": Prompts(uuid.uuid4().int).make(num_tokens), "max_tokens": 8, "ignore_eos": True}
    async with aiohttp.ClientSession(url, raise_for_status=True) as session:
        if not model:
            async with session.get("/v1/models") as response:
                body["model"] = (await response.json())["data"][0]["id"]
        async with session.post("/v1/completions", json=body, headers={"x-request-id": request_id}) as response:
            await response.read()
        async with session.get(f"/debug/timeline/{request_id}") as response:
            timeline: Mapping[str, Any] = await response.json()
            return timeline


def describe(timeline: Mapping[str, Any]) -> str:
    """The timeline as a person reads it."""
    lines = [f"prompt of {timeline['num_prompt_tokens']} tokens, {timeline['decision']} prefill"]
    lines += [f"  {phase:<17}{seconds * 1e3:9.1f} ms" for phase, seconds in timeline["phases_s"].items()]
    transfer = timeline["transfer"]
    if transfer is None:
        return "\n".join([*lines, "no KV was moved: the server has no prefill pool, or found the prompt cached"])
    moved = (
        f"{transfer['num_bytes'] / 1e6:.1f} MB over {transfer['transport']} in {transfer['transfer_s'] * 1e3:.1f} ms"
    )
    hidden, exposed = transfer["hidden_s"] * 1e3, transfer["transfer_exposed_s"] * 1e3
    early = f"{transfer['num_blocks_before_prefill_end']} of {transfer['num_blocks']}"
    lines.append(f"{moved}: {hidden:.1f} ms hidden under the prefill, {exposed:.1f} ms exposed")
    lines.append(f"{early} KV blocks had arrived before the prefill ended")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (http://127.0.0.1:8000)")
    parser.add_argument("--model", default="", help="the model's name there; the first that it lists if not set")
    parser.add_argument("--prompt-tokens", type=int, default=2000, metavar="N", help="length of the prompt (2000)")
    parser.add_argument("--json", action="store_true", help="print the timeline as it came")
    options = parser.parse_args(arguments)
    try:
        timeline = asyncio.run(fetch_timeline(options.url.rstrip("/"), options.model, options.prompt_tokens))
    except aiohttp.ClientError as error:
        sys.exit(f"benchmarks.timeline: {options.url}: {error}")
    print(json.dumps(timeline, indent=1) if options.json else describe(timeline))
    return 0


if __name__ == "__main__":
    sys.exit(main())
