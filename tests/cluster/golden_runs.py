"""All golden prompts at once through a generator, and what they must give."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from pdserve_wire.messages import Token
from pdserve_wire.timeline import RequestTimeline
from router.generation import GenerationRequest, Generator
from tests import golden

KINDS = ("greedy", "seeded")
CHUNKS = (64, 1024)


async def run_all(generator: Generator) -> dict[tuple[str, int], list[Token]]:
    """All prompts of both kinds, concurrently."""

    async def run(kind: str, number: int) -> list[Token]:
        request_id = f"{kind}-{number}"
        prompt = golden.load(kind)[number].prompt_ids
        request = GenerationRequest(request_id, tuple(prompt), golden.sampling_of(kind, number), timeout_s=280.0)
        async with aclosing(generator.generate(request, RequestTimeline(request_id))) as batches:
            return [token async for batch in batches for token in batch]

    keys = [(kind, number) for number in range(len(golden.PROMPTS)) for kind in KINDS]
    return dict(zip(keys, await asyncio.gather(*(run(*key) for key in keys)), strict=True))


def assert_golden(answers: dict[tuple[str, int], list[Token]]) -> None:
    for (kind, number), tokens in answers.items():
        assert [token.index for token in tokens] == list(range(golden.NUM_TOKENS))
        output_ids = [token.token_id for token in tokens]
        golden.assert_equal(golden.load(kind)[number], output_ids, kind, f"{kind} {number}")
