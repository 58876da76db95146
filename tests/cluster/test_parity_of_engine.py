"""One engine = transformers: 30 prompts, 64 tokens, greedy and seeded, in float32, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from pdserve.local import LocalGenerator
from tests.cluster.golden_runs import CHUNKS, assert_golden, run_all
from tests.cluster.makers import loaded_model


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
