"""Finished (or still growing) KV that waits to be pulled: the prefill side of the hand-off.

    add ---------> growing --first token--> offered --ACK--> empty --.
                      |  open/closed: at most one pull reads it      |
                      `---- close: the Prefill stream has ended -----'--> gone

The table is the `KvSource` of the worker's transport. A hand-off's blocks are held by its sequence
while it is computed, by the offer after its first token, and by the open pull as long as that runs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import asdict, dataclass, field

from engine.block_pool import Holder
from engine.engine import Engine
from engine.sequence import Sequence
from kvtransfer.errors import RefusedError, TransferError
from kvtransfer.messages import OpenRequest
from kvtransfer.outgoing import Outgoing
from pdserve_wire.deadlines import DEADLINES
from pdserve_wire.messages import PROTOCOL_MAX, PROTOCOL_MIN, Layout

logger = logging.getLogger(__name__)

NOT_COMPARED = "weights"


@dataclass(slots=True, eq=False)
class Handoff:
    """One prompt's KV. `blocks` are those of its tokens, in order, once the sequence has them."""

    handoff_id: str
    sequence: Sequence
    num_tokens: int
    last_attempt: int = -1
    payload: bytes | None = None  # the first token, once it is there
    pull: OpenPull | None = None
    is_closed: bool = False

    @property
    def blocks(self) -> list[int]:
        return self.sequence.block_tables[0]


@dataclass(slots=True, eq=False)
class OpenPull:
    """A transfer that reads a hand-off's blocks, which it holds by itself until it is over."""

    handoff: Handoff
    outgoing: Outgoing
    blocks: list[int]
    holder: Holder = Holder.PULLED
    over: asyncio.Event = field(default_factory=asyncio.Event)


class HandoffTable:
    """All hand-offs of one prefill worker, by id. Lives on the event loop."""

    def __init__(self, engine: Engine, layout: Layout, epoch: int) -> None:
        self.num_transfer_failures = 0
        self.num_transfer_bytes = 0
        self._engine = engine
        self._layout = asdict(layout)
        self._epoch = epoch
        self._handoffs: dict[str, Handoff] = {}
        self._pulls: dict[Outgoing, OpenPull] = {}
        self._stepped = engine.loop.stepped.subscribe()
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._handoffs)

    @property
    def offered(self) -> list[Handoff]:
        """Finished and not pulled yet."""
        return [handoff for handoff in self._handoffs.values() if handoff.payload is not None and handoff.pull is None]

    @property
    def pulling(self) -> list[Handoff]:
        return [pull.handoff for pull in self._pulls.values()]

    def add(self, sequence: Sequence) -> Handoff:
        """Register a sequence before the scheduler has it, so that no block is ever without an owner."""
        handoff = Handoff(secrets.token_urlsafe(24), sequence, sequence.num_tokens)
        self._handoffs[handoff.handoff_id] = handoff
        return handoff

    def finish(self, handoff: Handoff, payload: bytes) -> None:
        """The first token is there: every block is final."""
        handoff.payload = payload
        if handoff.pull is not None:
            handoff.pull.outgoing.finish(handoff.num_tokens, payload)

    def close(self, handoff: Handoff) -> None:
        """The lease ended, in whatever state. Never waits: what is in use is freed when it is let go."""
        if handoff.is_closed:
            return
        handoff.is_closed = True
        del self._handoffs[handoff.handoff_id]
        if handoff.pull is not None:
            self._force_closed(handoff.pull)
        if self._engine.scheduler.has(handoff.sequence):
            self._engine.loop.abort(handoff.sequence)
        else:
            self._release_offer(handoff)

    async def open(self, request: OpenRequest) -> Outgoing:
        """`KvSource.open`: bind the hand-off to a pull. A lower attempt that is open is closed first."""
        handoff = self._handoffs.get(request.handoff_id)
        if handoff is None or request.epoch != self._epoch:
            raise RefusedError("handoff_id", "unknown")
        self._check(request, handoff)
        if handoff.pull is not None:
            lower = handoff.pull
            lower.outgoing.abort()
            try:
                await asyncio.wait_for(lower.over.wait(), DEADLINES.release_s)
            except TimeoutError:
                raise RefusedError("pull_attempt", "an earlier pull has not let go yet") from None
            self._check(request, handoff)
        blocks = list(handoff.blocks)
        if handoff.is_closed or not blocks or handoff.pull is not None:
            raise RefusedError("handoff_id", "unknown")
        outgoing = Outgoing(self._engine.cache.memory(blocks))
        self._engine.pool.hold(blocks, Holder.PULLED)
        handoff.last_attempt = request.pull_attempt
        handoff.pull = self._pulls[outgoing] = OpenPull(handoff, outgoing, blocks)
        self._publish(handoff.pull)
        if handoff.payload is not None:
            outgoing.finish(handoff.num_tokens, handoff.payload)
        return outgoing

    def closed(self, outgoing: Outgoing, error: TransferError | None) -> None:
        """`KvSource.closed`: the transport has let go of the memory."""
        pull = self._pulls.pop(outgoing)
        pull.over.set()
        handoff = pull.handoff
        handoff.pull = None
        self._engine.pool.release(pull.blocks, pull.holder)
        if error is None:
            self.num_transfer_bytes += outgoing.num_blocks * outgoing.block_nbytes
            if not handoff.is_closed:
                self._release_offer(handoff)
        elif not handoff.is_closed:
            self.num_transfer_failures += 1
            logger.warning("pull %d failed: %s", handoff.last_attempt, error)

    async def publish_steps(self) -> None:
        """Tell open pulls of each step, until cancelled. A step number that moves is the sign of life."""
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            for pull in list(self._pulls.values()):
                self._publish(pull)

    def _publish(self, pull: OpenPull) -> None:
        sequence = pull.handoff.sequence
        num_computed = pull.handoff.num_tokens if pull.handoff.payload is not None else sequence.num_computed_tokens
        num_finished = min(num_computed // self._engine.pool.block_size, len(pull.blocks))
        pull.outgoing.publish(num_finished, num_computed, self._engine.scheduler.step)

    def _check(self, request: OpenRequest, handoff: Handoff) -> None:
        if request.protocol_max < PROTOCOL_MIN or request.protocol_min > PROTOCOL_MAX:
            raise RefusedError("protocol", f"this worker speaks {PROTOCOL_MIN} to {PROTOCOL_MAX}")
        for name, ours in self._layout.items():
            if name != NOT_COMPARED and request.layout.get(name) != ours:
                raise RefusedError(name, f"{request.layout.get(name)} does not fit {ours}")
        if request.pull_attempt < handoff.last_attempt:
            raise RefusedError("pull_attempt", f"attempt {handoff.last_attempt} has been here already")

    def _release_offer(self, handoff: Handoff) -> None:
        blocks = handoff.blocks
        handoff.sequence.block_tables = ([],)
        self._engine.pool.release(blocks, Holder.OFFERED)

    def _force_closed(self, pull: OpenPull) -> None:
        pull.outgoing.abort()
        task = asyncio.get_running_loop().create_task(self._quarantine_unless_over(pull))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _quarantine_unless_over(self, pull: OpenPull) -> None:
        """Past the deadline the blocks count as quarantined, until the transport lets go after all."""
        try:
            await asyncio.wait_for(pull.over.wait(), DEADLINES.release_s)
        except TimeoutError:
            logger.error("a pull did not let go of %d blocks in time: quarantined", len(pull.blocks))
            self._engine.pool.move(pull.blocks, Holder.PULLED, Holder.QUARANTINED)
            pull.holder = Holder.QUARANTINED
