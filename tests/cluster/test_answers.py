"""Two pools answer, and nothing is left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.cluster.makers import GREEDY, ClusterPlan, cluster


async def test_a_request_goes_through_both_pools_and_its_phases_add_up(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as made:
        tokens = await made.generate(list(range(100, 300)), request_id="one")
        assert [token.index for token in tokens] == list(range(16))
        assert tokens[-1].finish_reason == "length"
        timeline = made.timelines["one"]
        assert timeline.decision == "remote"
        phases = timeline.phases()
        assert phases["relay"] > -0.001 and phases["gap_relay"] > -0.001
        assert timeline.transfer is not None
        assert timeline.transfer.num_blocks == 13
        assert timeline.transfer.num_bytes == 13 * made.decode[0].state.engine.cache.shape.block_nbytes


async def test_kv_leaves_before_a_long_prefill_ends(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as made:
        await made.generate(list(range(1000, 2000)), replace(GREEDY, max_tokens=2), request_id="long")
        transfer = made.timelines["long"].transfer
        assert transfer is not None
        assert transfer.num_blocks_before_prefill_end >= transfer.num_blocks // 2


async def test_one_token_needs_no_transfer(model_folder: Path, tmp_path: Path) -> None:
    """faults: max_tokens 1 and 2."""
    async with cluster(model_folder, tmp_path) as made:
        for num_tokens in (1, 2):
            tokens = await made.generate(list(range(50, 90)), replace(GREEDY, max_tokens=num_tokens))
            assert len(tokens) == num_tokens
            assert tokens[-1].finish_reason == "length"
            assert made.decode[0].state.puller.counters.num_pulls == num_tokens - 1


async def test_many_at_once_give_what_each_gives_alone(model_folder: Path, tmp_path: Path) -> None:
    prompts = [[number * 7 + place for place in range(20 + 9 * number)] for number in range(8)]
    async with cluster(model_folder, tmp_path, ClusterPlan(dtype="float32")) as made:
        sampling = replace(GREEDY, max_tokens=8)
        alone = [await made.token_ids(prompt, sampling) for prompt in prompts]
        assert await asyncio.gather(*(made.token_ids(prompt, sampling) for prompt in prompts)) == alone


async def test_without_a_prefill_worker_decode_prefills_by_itself(model_folder: Path, tmp_path: Path) -> None:
    """faults: no prefill worker is left."""
    prompt = list(range(100, 200))
    async with cluster(model_folder, tmp_path, ClusterPlan(dtype="float32")) as made:
        expected = await made.token_ids(prompt)
    async with cluster(model_folder, tmp_path, ClusterPlan(num_prefill=0, dtype="float32")) as made:
        assert await made.token_ids(prompt, request_id="local") == expected
        assert made.timelines["local"].decision == "local"
        assert made.timelines["local"].handoff_gap_s == 0.0
