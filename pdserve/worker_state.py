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
        return self.engine.loop.step_age_s > DEADLINES.stuck_step_s

    @property
    def is_leaking(self) -> bool:
        """So many blocks are quarantined that only a new process brings them back."""
        pool = self.engine.pool
        return pool.num_held(Holder.QUARANTINED) > _MAX_QUARANTINED_SHARE * pool.num_blocks

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
