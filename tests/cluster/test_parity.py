"""Pools = one engine = transformers: 30 prompts, 64 tokens, greedy and seeded, in float32, all at once."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from pdserve.local import LocalGenerator
from pdserve_wire.messages import Token
from pdserve_wire.timeline import RequestTimeline
from router.generation import GenerationRequest, Generator
from tests import golden
from tests.cluster.makers import ClusterPlan, cluster, loaded_model

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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("chunk", CHUNKS)
async def test_two_pools_give_what_transformers_gives(model_folder: Path, tmp_path: Path, chunk: int) -> None:
    """faults: same prompts, same seeds, one engine against two pools."""
    plan = ClusterPlan(
        dtype="float32",
        num_prefill_blocks=512,
        num_decode_blocks=900,
        max_num_seqs=64,
        max_num_batched_tokens=chunk,
    )
    async with cluster(model_folder, tmp_path, plan) as made:
        assert_golden(await run_all(made.router.dispatcher))
        assert made.decode[0].state.puller.counters.num_pulls == 2 * len(golden.PROMPTS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("chunk", CHUNKS)
async def test_one_engine_gives_what_transformers_gives(model_folder: Path, chunk: int) -> None:
    config = EngineConfig(
        model=model_folder, num_blocks=900, max_num_seqs=64, max_num_batched_tokens=chunk, poison_freed_blocks=True
    )
    engine = Engine.build(loaded_model(model_folder, "float32", 0), config)
    engine.loop.start()
    try:
        assert_golden(await run_all(LocalGenerator(engine)))
        assert engine.pool.num_free == engine.pool.num_blocks
    finally:
        await engine.loop.stop()
