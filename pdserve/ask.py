"""`pdserve chat` and `pdserve status`: what a person asks of a running server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from pdserve.client import Client
from pdserve.config import ChatOptions, StatusOptions
from pdserve.tables import draw_status, draw_timeline
from pdserve_wire.auth import read_token


def chat(options: ChatOptions, prompt: str) -> int:
    """Stream the answer to stdout."""
    return asyncio.run(_chat(options, prompt))


def status(options: StatusOptions) -> int:
    """Print the server's workers, as a table or as JSON."""
    return asyncio.run(_status(options))


async def _chat(options: ChatOptions, prompt: str) -> int:
    api_key = options.api_key or os.environ.get("PDSERVE_API_KEY")
    async with Client(options.url, api_key, _token(options.cluster_token_file)) as client:
        await print_reply(client, options, prompt, options.model)
    return 0


async def print_reply(client: Client, options: ChatOptions, prompt: str, model: str | None = None) -> str:
    """Stream the answer to stdout, then its timeline if that was asked for. Returns the answer."""
    texts: list[str] = []
    async with client.chat([{"role": "user", "content": prompt}], options, model) as reply:
        async for text in reply:
            texts.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    print()
    if options.timeline:
        is_unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
        print(f"\n{draw_timeline(await client.timeline(reply.request_id), '█' if is_unicode else '#')}")
    return "".join(texts)


async def _status(options: StatusOptions) -> int:
    async with Client(options.url, cluster_token=_token(options.cluster_token_file)) as client:
        answer = await client.status()
    print(json.dumps(answer, indent=2) if options.json else draw_status(answer))
    return 0


def _token(path: Path | None) -> str | None:
    return None if path is None else read_token(path)
