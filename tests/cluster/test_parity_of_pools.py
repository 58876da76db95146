"""Pools = transformers: 30 prompts, 64 tokens, greedy and seeded, in float32, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import golden
from tests.cluster.golden_runs import CHUNKS, assert_golden, run_all
from tests.cluster.makers import ClusterPlan, cluster


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
