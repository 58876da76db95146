"""Workers die (SIGKILL) and freeze (SIGSTOP) at every phase; the client's text does not change."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from engine.sampling import SamplingParams
from pdserve_wire.errors import Unavailable
from tests.cluster.makers import GREEDY, until
from tests.cluster.processes import ProcessCluster, process_cluster

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
OPTIONS = ("--dtype", "float32", "--num-blocks", "256", "--max-num-batched-tokens", "64", "--poison-freed-blocks")
PROMPT = list(range(1000, 1400))  # seven chunks
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
SAMPLINGS = {"greedy": replace(GREEDY, max_tokens=24), "seeded": SEEDED}

# When the signal comes, by what the router and the workers know of the request.
PHASES = ("prefilling", "pulling", "first token", "token 7")


async def reached(made: ProcessCluster, phase: str, num_tokens: Callable[[], int], request_id: str) -> None:
    """Wait for a phase of the one request that runs."""
    timeline = made.timelines[request_id]
    if phase == "prefilling":
        await until(lambda: bool(timeline.prefill_worker))
    elif phase == "pulling":
        await until(lambda: bool(timeline.decode_worker))
        name = timeline.decode_worker
        while (await made.ledger(name))["requests"]["decode.pulling"] == 0:
            await asyncio.sleep(0.005)
    else:
        await until(lambda: num_tokens() >= (1 if phase == "first token" else 7), 60.0)


async def run_with_a_death(
    made: ProcessCluster, role: str, number: signal.Signals, phase: str, sampling: SamplingParams, request_id: str
) -> tuple[list[int], str]:
    """The tokens of a request whose worker of `role` got a signal in `phase`, and the worker's name."""
    received: list[int] = []

    async def read() -> None:
        async with aclosing(made.stream(PROMPT, sampling, request_id)) as batches:
            async for batch in batches:
                received.extend(token.token_id for token in batch)

    task = asyncio.create_task(read())
    await until(lambda: request_id in made.timelines)
    await reached(made, phase, lambda: len(received), request_id)
    timeline = made.timelines[request_id]
    victim = timeline.prefill_worker if role == "prefill" else timeline.decode_worker
    made.signal(victim, number)
    async with asyncio.timeout(90):
        await task
    return received, victim


@pytest.mark.timeout(600)
async def test_text_is_the_same_whoever_dies_and_whenever(model_folder: Path, tmp_path: Path) -> None:
    """faults: SIGKILL (and SIGSTOP) prefill at each phase; a decode worker is killed at token k of a seeded stream."""
    async with process_cluster(model_folder, tmp_path, WORKERS, OPTIONS) as made:
        expected = {name: await made.token_ids(PROMPT, sampling) for name, sampling in SAMPLINGS.items()}
        number = 0
        for role in ("prefill", "decode"):
            for kind in (signal.SIGKILL, signal.SIGSTOP):
                for phase in PHASES:
                    if role == "decode" and phase == "prefilling":
                        continue  # decode is not in it yet
                    if role == "prefill" and phase == "token 7":
                        continue  # prefill is out of it
                    name = "greedy" if number % 2 else "seeded"
                    number += 1
                    case = f"{kind.name} {role} {phase} {name}"
                    received, victim = await run_with_a_death(made, role, kind, phase, SAMPLINGS[name], case)
                    assert received == expected[name], case
                    await made.revive(victim, kind)
                    await made.assert_no_leaks(*WORKERS)


@pytest.mark.timeout(300)
async def test_with_no_other_decode_worker_the_client_gets_an_error_soon_and_the_next_request_works(
    model_folder: Path, tmp_path: Path
) -> None:
    async with process_cluster(model_folder, tmp_path, ("prefill-0", "decode-0"), OPTIONS) as made:
        expected = await made.token_ids(PROMPT)
        for kind in (signal.SIGKILL, signal.SIGSTOP):
            loop = asyncio.get_running_loop()
            with pytest.raises(Unavailable, match="decode"):
                await run_with_a_death(made, "decode", kind, "token 7", SAMPLINGS["greedy"], f"alone {kind.name}")
            died_at = loop.time()
            with pytest.raises(Unavailable, match="no decode worker"):
                await made.token_ids(PROMPT)
            assert loop.time() - died_at < 1.0, "with no decode worker the answer comes at once"
            await made.assert_no_leaks("prefill-0")
            await made.revive("decode-0", kind)
            assert await made.token_ids(PROMPT) == expected


@pytest.mark.timeout(300)
async def test_with_no_other_prefill_worker_decode_prefills_by_itself(model_folder: Path, tmp_path: Path) -> None:
    async with process_cluster(model_folder, tmp_path, ("prefill-0", "decode-0"), OPTIONS) as made:
        expected = await made.token_ids(PROMPT, SEEDED)
        for kind in (signal.SIGKILL, signal.SIGSTOP):
            received, _ = await run_with_a_death(made, "prefill", kind, "pulling", SEEDED, f"alone {kind.name}")
            assert received == expected
            await made.assert_no_leaks("decode-0")
            await made.revive("prefill-0", kind)
