"""What prefill publishes for one open pull: the blocks, and how far they are finished.

The serving loop writes it (publish, finish, fail, abort) and the transport's thread reads it; a lock
makes it whole. The memory of `blocks` is read only between `attach` and `mark_released`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.errors import AbortedError
from kvtransfer.messages import MAX_PAYLOAD_NBYTES
from kvtransfer.threads import Latch


class Sender(Protocol):
    """Whatever sends an `Outgoing`. Both are called under its lock, from any thread, and never block."""

    def wake(self) -> None:
        """There is something new in `Outgoing.progress()`."""
        ...

    def force_close(self) -> None:
        """Cut the connection, so that the sending thread returns."""
        ...


@dataclass(frozen=True, slots=True)
class Finish:
    """Prefill's end. `at` is `time.monotonic()` of the first token."""

    num_tokens: int
    payload: bytes
    at: float


@dataclass(frozen=True, slots=True)
class Progress:
    num_finished_blocks: int = 0
    num_computed_tokens: int = 0
    step: int = 0
    finish: Finish | None = None
    failure: str | None = None
    is_aborted: bool = False


class Outgoing:
    """The blocks of one pull, in the prompt's order, each a contiguous view of the same size.

    What comes after the end (finish, fail or abort) is ignored, except an abort, which counts until
    the memory is released.
    """

    def __init__(self, blocks: Sequence[memoryview]) -> None:
        self.blocks = as_blocks(blocks)
        self.num_blocks = len(self.blocks)
        self.block_nbytes = self.blocks[0].nbytes if self.blocks else 0
        self._lock = threading.Lock()
        self._progress = Progress()
        self._sender: Sender | None = None
        self._released = Latch()

    # The loop's side.

    def publish(self, num_finished_blocks: int, num_computed_tokens: int, step: int) -> None:
        """The first blocks that no step writes to any more. Call it each step, also without a new block:
        a `step` that stands still is taken for a stuck loop. Raises ValueError when a count shrinks.
        """
        with self._lock:
            if self._is_over():
                return
            before = self._progress.num_finished_blocks
            if not before <= num_finished_blocks <= self.num_blocks:
                raise ValueError(f"{num_finished_blocks} finished blocks after {before}, of {self.num_blocks}")
            self._progress = Progress(num_finished_blocks, num_computed_tokens, step)
            if num_finished_blocks > before and self._sender is not None:
                self._sender.wake()

    def finish(self, num_tokens: int, payload: bytes) -> None:
        """All blocks are finished, and the first token is there. Raises ValueError past 1 MiB of payload."""
        if len(payload) > MAX_PAYLOAD_NBYTES:
            raise ValueError(f"a payload of {len(payload)} bytes is more than {MAX_PAYLOAD_NBYTES}")
        with self._lock:
            if self._is_over():
                return
            finish = Finish(num_tokens, payload, time.monotonic())
            self._progress = Progress(self.num_blocks, num_tokens, self._progress.step, finish)
            if self._sender is not None:
                self._sender.wake()

    def fail(self, reason: str) -> None:
        """Prefill will not finish: the other side is told why. Blocks that wait to be sent are not."""
        with self._lock:
            if self._is_over():
                return
            self._progress = Progress(failure=reason)
            if self._sender is not None:
                self._sender.wake()

    def abort(self) -> None:
        """Force the connection closed at once. Any thread, any number of times, in any state."""
        with self._lock:
            if not self._released.is_set and not self._progress.is_aborted:
                self._progress = Progress(is_aborted=True)
                if self._sender is not None:
                    self._sender.force_close()
                    self._sender.wake()

    async def wait_released(self, timeout_s: float) -> bool:
        """True once no thread can read the blocks any more. False: not within the time; quarantine."""
        return await self._released.wait(timeout_s)

    # The transport's side.

    def attach(self, sender: Sender) -> None:
        """From now on the sender is told. Raises `AbortedError` when it needn't begin."""
        with self._lock:
            if self._progress.is_aborted:
                raise AbortedError("aborted before it was sent")
            self._sender = sender

    def progress(self) -> Progress:
        return self._progress  # one reference to a frozen value: whole without the lock

    def mark_released(self) -> None:
        """The thread has let go of `blocks`; the sender is never called again. Safe to call again."""
        with self._lock:
            self._sender = None
            self.blocks = ()
        self._released.set()

    def _is_over(self) -> bool:
        progress = self._progress
        is_ended = progress.finish is not None or progress.failure is not None or progress.is_aborted
        return is_ended or self._released.is_set


def as_blocks(blocks: Sequence[memoryview], must_be_writable: bool = False) -> tuple[memoryview, ...]:
    """The blocks as views of plain bytes. Raises ValueError unless they are contiguous and of one size."""
    views = []
    for block in blocks:
        if not block.c_contiguous or (must_be_writable and block.readonly):
            raise ValueError("a block must be contiguous, and writable where it is a destination")
        views.append(block.cast("B"))
        if views[-1].nbytes != views[0].nbytes or views[-1].nbytes == 0:
            raise ValueError("blocks must be of one size, and not empty")
    return tuple(views)
