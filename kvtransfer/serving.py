"""The prefill side of one pull: from OPEN to ACK, in the thread of its connection.

1. OPEN has come: check the protocol, ask the source on its loop; REFUSE or ACCEPT.
2. Send blocks in order as they are published; while there is nothing to send, WORKING each second,
   waiting for the loop (a pipe) and for the peer's leaving (the socket) at once.
3. Prefill has finished: DONE, then wait for ACK. It has failed: FAIL.
4. However it ends: the thread lets go of the memory, then the source is told.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time

from kvtransfer.connection import MAX_FRAMES, Connection
from kvtransfer.errors import AbortedError, ProtocolError, RefusedError, TransferError
from kvtransfer.frames import (
    PROTOCOL_VERSION,
    AcceptFrame,
    BlockFrame,
    DoneFrame,
    FailFrame,
    FrameType,
    OpenFrame,
    RefuseFrame,
    WorkingFrame,
)
from kvtransfer.gate import SourceGate
from kvtransfer.messages import Done, TransferDeadlines
from kvtransfer.outgoing import Finish, Outgoing, Progress

logger = logging.getLogger(__name__)

_MAX_BATCH_NBYTES = 4 << 20  # of blocks in one send: they are still in the cache after their checksums


class ServedPull:
    """One OPEN on one connection. Afterwards, if nothing was raised, the connection may carry another."""

    def __init__(self, connection: Connection, gate: SourceGate, deadlines: TransferDeadlines) -> None:
        self._connection = connection
        self._gate = gate
        self._deadlines = deadlines

    def serve(self, frame: OpenFrame) -> None:
        """Raises `TransferError` when it did not end in ACK; the connection must be closed then."""
        with contextlib.closing(_PipeSender(self._connection)) as sender:
            try:
                _check_protocol(frame)
                outgoing = self._gate.open(frame.request, self._deadlines.open_s)
            except RefusedError as error:
                self._connection.send([RefuseFrame(error.field, error.reason)])
                raise
            failure: TransferError | None = None
            try:
                self._serve_outgoing(frame, outgoing, sender)
            except TransferError as error:
                failure = AbortedError() if outgoing.progress().is_aborted else error
                raise
            except Exception as error:
                logger.exception("serving a pull failed")
                failure = TransferError(f"{type(error).__name__}: {error}")
                raise failure from error
            finally:
                outgoing.mark_released()  # before the connection closes: then the peer may ask again
                self._gate.closed(outgoing, failure)

    def _serve_outgoing(self, frame: OpenFrame, outgoing: Outgoing, sender: _PipeSender) -> None:
        try:
            _check_destination(frame, outgoing)
        except RefusedError as error:
            self._connection.send([RefuseFrame(error.field, error.reason)])
            raise
        outgoing.attach(sender)
        self._connection.send([AcceptFrame(PROTOCOL_VERSION)])
        self._send_blocks(outgoing, sender, time.monotonic())
        self._receive_ack()

    def _receive_ack(self) -> None:
        until = time.monotonic() + self._deadlines.peer_timeout_s
        header = self._connection.receive_header(until=until)
        if header.type is not FrameType.ACK:
            raise ProtocolError(f"{header.type.name} where ACK is expected")
        self._connection.receive_body(header, until)

    def _send_blocks(self, outgoing: Outgoing, sender: _PipeSender, accepted_at: float) -> None:
        num_sent = num_sent_before_finish = 0
        working_at = accepted_at + self._deadlines.working_interval_s
        while True:
            progress = outgoing.progress()
            if progress.is_aborted:
                raise AbortedError()
            if progress.failure is not None:
                self._connection.send([FailFrame(progress.failure)])
                raise AbortedError(f"prefill failed: {progress.failure}")
            if num_sent < progress.num_finished_blocks:
                num_sent += self._send_batch(outgoing, num_sent, progress)
                if progress.finish is None:
                    num_sent_before_finish = num_sent
            elif progress.finish is not None:
                done = _done(progress.finish, accepted_at)
                self._connection.send([DoneFrame(done, num_sent_before_finish)])
                return
            elif time.monotonic() >= working_at:
                self._connection.send([WorkingFrame(progress.num_computed_tokens, progress.step)])
            else:
                sender.wait(working_at - time.monotonic())
                continue
            working_at = time.monotonic() + self._deadlines.working_interval_s

    def _send_batch(self, outgoing: Outgoing, num_sent: int, progress: Progress) -> int:
        num_blocks = min(MAX_FRAMES, max(1, _MAX_BATCH_NBYTES // outgoing.block_nbytes))
        end = min(num_sent + num_blocks, progress.num_finished_blocks)
        self._connection.send([BlockFrame(index, outgoing.blocks[index]) for index in range(num_sent, end)])
        return end - num_sent


class _PipeSender:
    """How an `Outgoing` reaches the thread that sends it: a byte in a pipe, or the connection's end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it wakes all the same
            os.write(self._writer, b"\0")

    def force_close(self) -> None:
        self._connection.shutdown()

    def wait(self, timeout_s: float) -> None:
        """Until woken. Raises when the peer leaves or speaks meanwhile."""
        self._connection.wait_quiet(self._reader, timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


def _check_protocol(frame: OpenFrame) -> None:
    if not frame.request.protocol_min <= PROTOCOL_VERSION <= frame.request.protocol_max:
        raise RefusedError("protocol", f"only {PROTOCOL_VERSION} is spoken here")


def _check_destination(frame: OpenFrame, outgoing: Outgoing) -> None:
    if frame.num_blocks != outgoing.num_blocks:
        raise RefusedError("num_blocks", f"{outgoing.num_blocks} here, {frame.num_blocks} asked for")
    if frame.block_nbytes != outgoing.block_nbytes:
        raise RefusedError("block_nbytes", f"{outgoing.block_nbytes} here, {frame.block_nbytes} asked for")


def _done(finish: Finish, accepted_at: float) -> Done:
    return Done(
        num_tokens=finish.num_tokens,
        payload=finish.payload,
        exposed_s=max(0.0, time.monotonic() - max(finish.at, accepted_at)),
        open_wait_s=max(0.0, accepted_at - finish.at),
    )
