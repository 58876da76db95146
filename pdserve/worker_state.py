"""One worker process at a glance: its load, its ledger, whether it is in order."""

from __future__ import annotations

import json
from dataclasses import dataclass

from decode_worker.puller import Puller
from decode_worker.service import DecodeService
from engine.block_pool import Holder
from engine.engine import Engine
from pdserve_wire.deadlines import DEADLINES
from pdserve_wire.gate import Gate
from pdserve_wire.messages import WorkerLoad
from prefill_worker.handoff_table import HandoffTable

_MAX_QUARANTINED_SHARE = 0.05  # past it the worker drains and restarts


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Reads what the parts of a worker know. Both roles' parts exist in every worker; the role says
    which services are open."""

    worker_id: str
    role: str
    engine: Engine
    gate: Gate
    table: HandoffTable
    puller: Puller
    decode: DecodeService

    @property
    def is_stuck(self) -> bool:
        loop = self.engine.loop
        return loop.has_died or loop.step_age_s > DEADLINES.stuck_step_s

    @property
    def needs_restart(self) -> str | None:
        """Why only a new process helps."""
        pool = self.engine.pool
        if self.engine.loop.has_died:
            return "the engine loop has died"
        if pool.num_held(Holder.QUARANTINED) > _MAX_QUARANTINED_SHARE * pool.num_blocks:
            return f"more than {_MAX_QUARANTINED_SHARE:.0%} of the KV blocks are quarantined"
        return None

    def load(self) -> WorkerLoad:
        scheduler, loop = self.engine.scheduler, self.engine.loop
        return WorkerLoad(
            is_ready=not self.is_stuck and not self.gate.is_draining,
            is_draining=self.gate.is_draining,
            step=scheduler.step,
            step_age_s=loop.step_age_s,
            num_waiting=len(scheduler.waiting) + self.decode.reservations.num_waiting,
            num_running=len(scheduler.running) + self.decode.reservations.num_pending,
            kv_blocks=self.engine.pool.ledger(),
            num_blocks=self.engine.pool.num_blocks,
            num_prompt_tokens=loop.num_prompt_tokens,
            num_generation_tokens=loop.num_generation_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_transfer_bytes=self.table.num_transfer_bytes + self.puller.counters.num_bytes,
            num_handoffs=len(self.table),
            num_transfer_failures=self.table.num_transfer_failures + self.puller.failures.total(),
        )

    def ledger(self) -> str:
        """For `/debug/ledger`: every block's state and holders, and what is open. JSON."""
        return json.dumps(
            {
                "worker_id": self.worker_id,
                "role": self.role,
                "num_blocks": self.engine.pool.num_blocks,
                "states": self.engine.pool.ledger(),
                "holders": {str(block): kinds for block, kinds in self.engine.pool.holders().items()},
                "requests": {
                    "leases": len(self.gate.leases),
                    "scheduler.waiting": len(self.engine.scheduler.waiting),
                    "scheduler.running": len(self.engine.scheduler.running),
                    "handoffs": len(self.table),
                    "handoffs.offered": len(self.table.offered),
                    "handoffs.pulling": len(self.table.pulling),
                    **{f"decode.{name}": len(requests) for name, requests in self.decode.states.items()},
                },
            }
        )
