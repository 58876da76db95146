"""The decode side of one pull, in a thread of its own.

1. Take a pooled connection, or make one; say OPEN. A pooled one that turns out dead before it has
   answered is replaced by a fresh one, once.
2. ACCEPT: from here on the thread may write to the destination.
3. BLOCK after BLOCK, in order, straight into its place, verified there. WORKING is a sign of life,
   unless its step stands still for too long.
4. DONE: say ACK, and give the connection back to the pool. The thread returns: the memory is free.

`abort` settles the outcome at once and cuts the connection, which makes the thread return.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from kvtransfer.connection import Connection
from kvtransfer.errors import AbortedError, PeerLostError, PeerSilentError, ProtocolError, RefusedError, TransferError
from kvtransfer.frames import (
    PROTOCOL_VERSION,
    AcceptFrame,
    AckFrame,
    DoneFrame,
    FailFrame,
    FrameType,
    OpenFrame,
    RefuseFrame,
    WorkingFrame,
)
from kvtransfer.messages import OpenRequest, PullResult, TransferDeadlines
from kvtransfer.pool import ConnectionPool
from kvtransfer.threads import Latch

logger = logging.getLogger(__name__)


class SocketPull:
    """A `Pull` over a stream socket."""

    def __init__(
        self,
        transport: str,
        pool: ConnectionPool,
        deadlines: TransferDeadlines,
        address: str,
        request: OpenRequest,
        blocks: tuple[memoryview, ...],
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._deadlines = deadlines
        self._address = address
        self._request = request
        self._blocks = blocks
        self._lock = threading.Lock()  # over the next three
        self._outcome: PullResult | TransferError | None = None
        self._connection: Connection | None = None
        self._may_write = False
        self._released = Latch()
        self._settled = Latch()

    async def result(self) -> PullResult:
        await self._settled.wait()
        assert self._outcome is not None
        if isinstance(self._outcome, TransferError):
            raise self._outcome
        return self._outcome

    def abort(self) -> None:
        self.give_up(AbortedError("aborted on this side"))

    async def wait_released(self) -> bool:
        return await self._released.wait(self._deadlines.release_s)

    def give_up(self, error: TransferError) -> None:
        """End it with this error, unless it is over."""
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = error
            if self._connection is not None:
                self._connection.shutdown()
            if not self._may_write:
                self._released.set()
        self._settled.set()

    def run(self) -> None:
        """The thread."""
        outcome: PullResult | TransferError
        try:
            outcome = self._pull()
        except TransferError as error:
            outcome = error
        except Exception as error:
            logger.exception("a pull failed")
            outcome = TransferError(f"{type(error).__name__}: {error}")
        if isinstance(outcome, TransferError):
            outcome.forget_frames()
        with self._lock:
            self._disconnect()
            self._blocks = ()
            self._released.set()
            if self._outcome is None:
                self._outcome = outcome
        self._settled.set()

    def _pull(self) -> PullResult:
        opened_at = time.monotonic()
        connection = self._open()
        with self._lock:
            self._check_wanted()
            self._may_write = True
        frame = self._receive_blocks(connection)
        transfer_s = time.monotonic() - opened_at
        self._acknowledge(connection)
        return PullResult(
            done=frame.done,
            transport=self._transport,
            num_bytes=sum(block.nbytes for block in self._blocks),
            num_blocks=len(self._blocks),
            transfer_s=transfer_s,
            num_blocks_before_prefill_end=frame.num_blocks_before_prefill_end,
        )

    def _open(self) -> Connection:
        pooled = self._pool.take(self._address, self._request.epoch)
        if pooled is not None:
            try:
                self._say_open(pooled)
                return pooled
            except PeerLostError:
                with self._lock:
                    self._disconnect()
        fresh = self._pool.dial(self._address)
        self._say_open(fresh)
        return fresh

    def _say_open(self, connection: Connection) -> None:
        """Returns at ACCEPT."""
        with self._lock:
            self._connection = connection
            self._check_wanted()
        until = time.monotonic() + self._deadlines.open_s
        block_nbytes = self._blocks[0].nbytes if self._blocks else 0
        connection.send([OpenFrame(self._request, len(self._blocks), block_nbytes)])
        header = connection.receive_header(until=until)
        match connection.receive_body(header, until):
            case AcceptFrame(protocol):
                if protocol != PROTOCOL_VERSION:
                    raise ProtocolError(f"ACCEPT of protocol {protocol}, which was not offered")
            case RefuseFrame(field, reason):
                raise RefusedError(field, reason)
            case _:
                raise ProtocolError(f"{header.type.name} where ACCEPT is expected")

    def _receive_blocks(self, connection: Connection) -> DoneFrame:
        num_received = 0
        watch = _StepWatch(self._deadlines.stuck_step_s)
        while True:
            is_whole = num_received == len(self._blocks)
            header = connection.receive_header(None if is_whole else self._blocks[num_received].nbytes)
            if header.type is FrameType.BLOCK:
                if header.index != num_received:
                    raise ProtocolError(f"BLOCK {header.index} where {num_received} is expected")
                connection.receive_block(header, self._blocks[num_received])
                num_received += 1
                watch.restart()
                continue
            match connection.receive_body(header):
                case WorkingFrame(_, step):
                    watch.check(step)
                case FailFrame(reason):
                    raise AbortedError(f"prefill failed: {reason}")
                case DoneFrame() as frame if is_whole:
                    return frame
                case _:
                    raise ProtocolError(f"{header.type.name} after {num_received} of {len(self._blocks)} blocks")

    def _acknowledge(self, connection: Connection) -> None:
        """Everything is here, so a peer that is lost now changes nothing."""
        try:
            connection.send([AckFrame()])
        except (PeerLostError, PeerSilentError):
            return
        with self._lock:
            if self._outcome is not None:  # aborted: the connection is cut
                return
            self._connection = None  # an abort from now on is not the connection's concern
        self._pool.give(self._address, self._request.epoch, connection)

    def _check_wanted(self) -> None:
        if self._outcome is not None:
            raise AbortedError()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@dataclass(slots=True)
class _StepWatch:
    """Raises when WORKING repeats one step for longer than `stuck_step_s`."""

    stuck_step_s: float
    step: int | None = None
    since: float = 0.0

    def restart(self) -> None:
        self.step = None

    def check(self, step: int) -> None:
        now = time.monotonic()
        if step != self.step:
            self.step, self.since = step, now
        elif now - self.since > self.stuck_step_s:
            raise PeerSilentError(f"step {step} has not ended for {now - self.since:.1f} s")
