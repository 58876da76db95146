"""Readiness follows the step loop, not the process."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from engine.batch import Batch
from pdserve_wire.deadlines import DEADLINES
from tests.cluster.makers import ClusterPlan, cluster, until


async def test_a_worker_whose_step_is_stuck_is_not_ready_and_an_idle_one_is(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faults: decode's loop is stuck (not its process)."""
    async with cluster(model_folder, tmp_path, ClusterPlan(num_prefill=0)) as made:
        loop = made.decode[0].state.engine.loop
        runner, may_go_on = loop._runner, threading.Event()

        class StuckRunner:
            def run(self, batch: Batch) -> object:
                may_go_on.wait(30)
                return runner.run(batch)

        monkeypatch.setattr(loop, "_runner", StuckRunner())
        object.__setattr__(DEADLINES, "stuck_step_s", 0.5)
        try:
            stream = made.stream([1, 2, 3])
            waiting = asyncio.ensure_future(anext(stream))
            await until(lambda: not made.router.fleet.ready("decode"))
            may_go_on.set()
            await waiting
            await stream.aclose()
            await until(lambda: bool(made.router.fleet.ready("decode")))
        finally:
            object.__setattr__(DEADLINES, "stuck_step_s", 60.0)
