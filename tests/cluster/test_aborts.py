"""A client may leave at any moment: in every state that exists, all blocks come back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine.block_pool import Holder
from pdserve.worker import WorkerServer
from tests.cluster.makers import GREEDY, Cluster, ClusterPlan, cluster, until, until_freed

SHORT = list(range(100, 140))
LONG = list(range(1000, 2500))  # many chunks
ENDLESS = replace(GREEDY, max_tokens=1000)


@asynccontextmanager
async def occupied(worker: WorkerServer) -> AsyncIterator[None]:
    """All of a worker's blocks are in somebody's hands while the block runs."""
    pool = worker.state.engine.pool
    blocks = pool.allocate(pool.num_free, Holder.SEQUENCE)
    assert blocks is not None
    try:
        yield
    finally:
        pool.release(blocks, Holder.SEQUENCE)


def requests_in(worker: WorkerServer, state: str) -> int:
    """What the worker's own ledger counts in a state."""
    return int(json.loads(worker.state.ledger())["requests"][state])


@asynccontextmanager
async def held_in(made: Cluster, role: str, state: str) -> AsyncIterator[WorkerServer]:
    """Drive one request into a state of a role; leave when the block ends."""
    worker = made.prefill[0] if role == "prefill" else made.decode[0]
    prompt, full = SHORT, None
    if (
        state in ("scheduler.waiting", "scheduler.running", "handoffs", "handoffs.pulling", "leases")
        and role == "prefill"
    ):
        prompt = LONG
        full = worker if state == "scheduler.waiting" else None
    elif state in ("handoffs.offered", "decode.waiting"):
        full = made.decode[0]
    elif state == "decode.pulling" or state == "decode.prefilling":
        prompt = LONG
    task = asyncio.create_task(made.generate(prompt, ENDLESS))
    try:
        if full is None:
            await until(lambda: requests_in(worker, state) > 0)
            yield worker
        else:
            async with occupied(full):
                await until(lambda: requests_in(worker, state) > 0)
                yield worker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


PREFILL_STATES = (
    "leases",
    "scheduler.waiting",
    "scheduler.running",
    "handoffs",
    "handoffs.offered",
    "handoffs.pulling",
)
DECODE_STATES = ("leases", "scheduler.running", "decode.waiting", "decode.pulling", "decode.running")
LOCAL_STATES = ("decode.prefilling", "scheduler.waiting")


async def test_no_state_exists_without_an_abort_test(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as made:
        states = json.loads(made.prefill[0].state.ledger())["requests"].keys()
    assert set(states) == {*PREFILL_STATES, *DECODE_STATES, *LOCAL_STATES}


async def test_a_client_that_leaves_in_any_state_leaves_nothing_behind(model_folder: Path, tmp_path: Path) -> None:
    """faults: abort in every state that exists; abort from decode while in each of prefill's queues; decode has no
    room, so the request waits there, and the client leaves."""
    async with cluster(model_folder, tmp_path) as made:
        expected = await made.token_ids(SHORT)
        for role, states in (("prefill", PREFILL_STATES), ("decode", DECODE_STATES)):
            for state in states:
                async with held_in(made, role, state):
                    pass
                await made.assert_no_leaks()
        assert await made.token_ids(SHORT) == expected


async def test_a_client_that_leaves_a_local_prefill_leaves_nothing_behind(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path, ClusterPlan(num_prefill=0)) as made:
        async with held_in(made, "decode", "decode.prefilling"):
            pass
        await made.assert_no_leaks()
        waiter = asyncio.create_task(made.generate(SHORT, ENDLESS))
        async with occupied(made.decode[0]):
            await until(lambda: requests_in(made.decode[0], "scheduler.waiting") > 0)
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
            await until_freed(made.decode[0], lambda: requests_in(made.decode[0], "leases") == 0)


async def test_blocks_are_back_within_a_second_of_the_running_step(model_folder: Path, tmp_path: Path) -> None:
    async with cluster(model_folder, tmp_path) as made:
        async with held_in(made, "prefill", "handoffs.pulling") as prefill:
            pass
        left_at = asyncio.get_running_loop().time()
        await until_freed(prefill, lambda: len(prefill.state.engine.scheduler.running) == 0)
        step_s = prefill.state.engine.loop.last_step_s
        await made.assert_no_leaks()
        assert asyncio.get_running_loop().time() - left_at < 1.0 + 2 * step_s


async def test_prefill_full_of_handoffs_that_nobody_pulls_serves_again_when_their_clients_leave(
    model_folder: Path, tmp_path: Path
) -> None:
    """faults: prefill's pool is full of hand-offs that nobody will pull, and no new work arrives."""
    plan = ClusterPlan(num_prefill_blocks=16, num_decode_blocks=80)
    async with cluster(model_folder, tmp_path, plan) as made:
        prefill, decode = made.prefill[0], made.decode[0]
        async with occupied(decode):
            tasks = [asyncio.create_task(made.generate(SHORT, ENDLESS)) for _ in range(6)]
            # those that had started when the third was offered end; nothing starts while offers hold half of the pool
            await until(
                lambda: (
                    requests_in(prefill, "handoffs.offered") >= 3
                    and requests_in(prefill, "scheduler.waiting") >= 1
                    and requests_in(prefill, "scheduler.running") == 0
                )
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until_freed(prefill, lambda: prefill.state.engine.pool.num_free == 16)
        assert len(await made.token_ids(SHORT)) == 16


@pytest.mark.timeout(300)
async def test_two_hundred_requests_with_random_aborts_leave_a_balanced_ledger(
    model_folder: Path, tmp_path: Path
) -> None:
    randomly = random.Random(11)
    plan = ClusterPlan(num_prefill_blocks=96, num_decode_blocks=64, max_num_batched_tokens=128)
    prompts = [[randomly.randrange(1000, 20000) for _ in range(randomly.randrange(5, 120))] for _ in range(20)]
    async with cluster(model_folder, tmp_path, plan) as made:
        places = asyncio.Semaphore(32)
        num_finished = 0

        async def one(number: int) -> None:
            nonlocal num_finished
            async with places:
                stream = made.generate(prompts[number % 20], replace(GREEDY, max_tokens=randomly.randrange(1, 12)))
                if number % 2:
                    assert (await stream)[-1].finish_reason == "length"
                    num_finished += 1
                    return
                task = asyncio.create_task(stream)
                await asyncio.wait([task], timeout=randomly.uniform(0, 1.5))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(one(number) for number in range(200)))
        assert num_finished == 100
        assert made.router.dispatcher.num_in_flight == 0


async def test_two_prompts_of_most_of_the_pool_each_take_turns(model_folder: Path, tmp_path: Path) -> None:
    """faults: decode's pool smaller than one prompt; n prompts each wanting 60 % of it."""
    plan = ClusterPlan(num_prefill_blocks=20, num_decode_blocks=20)
    prompts = [list(range(start, start + 192)) for start in (100, 1000, 2000, 3000)]  # 12 blocks and one to write to
    async with cluster(model_folder, tmp_path, plan) as made:
        answers = await asyncio.gather(*(made.generate(prompt) for prompt in prompts))
        assert [len(answer) for answer in answers] == [16] * 4


async def test_sequences_that_outgrow_the_pool_are_preempted_and_give_the_same_tokens(
    model_folder: Path, tmp_path: Path
) -> None:
    """faults: decode preempts a sequence right after its transfer."""
    sampling = replace(GREEDY, max_tokens=40)
    prompts = [list(range(start, start + 60)) for start in (100, 400, 700, 1000)]
    async with cluster(model_folder, tmp_path, ClusterPlan(dtype="float32")) as made:
        expected = [await made.token_ids(prompt, sampling) for prompt in prompts]
    async with cluster(model_folder, tmp_path, ClusterPlan(dtype="float32", num_decode_blocks=20)) as made:
        assert await asyncio.gather(*(made.token_ids(prompt, sampling) for prompt in prompts)) == expected
        assert made.decode[0].state.engine.scheduler.num_preemptions > 0


async def test_a_lease_that_ends_is_told_to_its_caller_and_the_request_goes_on(
    model_folder: Path, tmp_path: Path
) -> None:
    async with cluster(model_folder, tmp_path) as made:
        sampling = replace(GREEDY, max_tokens=48)
        stream = made.stream(SHORT, sampling, request_id="resumed")
        received: list[int] = []
        while len(received) < 3:  # then decode has the KV, and much is left to do
            received += [token.token_id for token in await anext(stream)]
        assert made.decode[0].state.gate.leases.end(made.router.fleet.router_id) == 1
        async with asyncio.timeout(30):
            received += [token.token_id async for batch in stream for token in batch]
        assert len(received) == 48
        assert made.timelines["resumed"].resume_reasons == ["ABORTED"]
