"""Pulls the KV of one hand-off into reserved blocks, and never lets go of them too early.

A pull's destination is held as `WRITING` until the transport says that no byte can be written any
more; past the deadline the blocks are quarantined instead: never given out again, counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import asdict, dataclass

from engine.block_pool import Holder
from engine.engine import Engine
from kvtransfer.errors import ChecksumError, TransferError
from kvtransfer.messages import OpenRequest, PullResult
from kvtransfer.transport import Pull, Transport
from pdserve_wire.errors import Reason, Unavailable
from pdserve_wire.messages import PROTOCOL_MAX, PROTOCOL_MIN, KvHandoff, Layout

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PullCounters:
    num_bytes: int = 0
    num_pulls: int = 0
    transfer_s: float = 0.0
    num_checksum_failures: int = 0


class Puller:
    """All pulls of one decode worker. Lives on the event loop; the bytes move elsewhere."""

    def __init__(self, engine: Engine, transport: Transport, layout: Layout) -> None:
        self.counters = PullCounters()
        self.failures: Counter[str] = Counter()  # by reason
        self.transport_name = transport.name
        self._engine = engine
        self._transport = transport
        self._layout = asdict(layout)
        self._releases: set[asyncio.Task[None]] = set()

    async def pull(self, handoff: KvHandoff, pull_attempt: int, blocks: list[int]) -> PullResult:
        """Fill the first of `blocks` with the hand-off's KV; afterwards all are held as `SEQUENCE`.

        Raises `Unavailable(KV_LOST)`. On that, and on cancellation, the blocks are given back, now or
        when the transport has let go of them.
        """
        num_blocks = self._engine.pool.num_blocks_for(handoff.num_tokens)
        request = OpenRequest(
            handoff_id=handoff.handoff_id,
            pull_attempt=pull_attempt,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            epoch=handoff.epoch,
            layout=self._layout,
        )
        pull = self._transport.pull(handoff.address, request, self._engine.cache.memory(blocks[:num_blocks]))
        try:
            result = await pull.result()
        except TransferError as error:
            self._release(pull, blocks)
            self.failures[error.label] += 1
            self.counters.num_checksum_failures += isinstance(error, ChecksumError)
            raise Unavailable(Reason.KV_LOST, f"{error.label}: {error}") from error
        except BaseException:
            self._release(pull, blocks)
            raise
        self._engine.pool.move(blocks, Holder.WRITING, Holder.SEQUENCE)
        self.counters.num_pulls += 1
        self.counters.num_bytes += result.num_bytes
        self.counters.transfer_s += result.transfer_s
        return result

    async def wait_released(self) -> None:
        """Until no blocks wait for a transport any more: bounded by its own deadline."""
        while self._releases:
            await asyncio.wait(self._releases)

    def _release(self, pull: Pull, blocks: list[int]) -> None:
        pull.abort()
        task = asyncio.get_running_loop().create_task(self._release_when_let_go(pull, blocks))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release_when_let_go(self, pull: Pull, blocks: list[int]) -> None:
        if await pull.wait_released():
            self._engine.pool.release(blocks, Holder.WRITING)
        else:
            logger.error("a transfer did not let go of %d blocks in time: quarantined", len(blocks))
            self._engine.pool.move(blocks, Holder.WRITING, Holder.QUARANTINED)
