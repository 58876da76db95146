"""The seam: what a worker sees of a transport, and what a transport needs from a prefill worker.

    decode worker                                     prefill worker
      transport.pull(address, request, blocks)          transport.listen(host, port, source)
         | Pull                                            | source.open(request) -> Outgoing
         |          OPEN ------------------------------->  |
         |          <------------------- ACCEPT, BLOCK x n |  outgoing.publish(...) after each step
         | result() <------------------------------- DONE  |  outgoing.finish(...)
         |          ACK -------------------------------->  |  source.closed(outgoing, None)

Transfers never run on the serving loop; every method here is called on it and returns at once, or
awaits without blocking it. One conformance suite (`tests/kvtransfer/`) holds for each transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtransfer.errors import TransferError
from kvtransfer.messages import OpenRequest, PullResult
from kvtransfer.outgoing import Outgoing


class KvSource(Protocol):
    """Prefill's hand-off table. Both methods are called on the loop that called `listen`."""

    async def open(self, request: OpenRequest) -> Outgoing:
        """Bind the hand-off to this attempt; the blocks stay held until `closed`.

        Raises `RefusedError` and then changes nothing. May take a while (it may first force a lower
        attempt closed and wait for its release), but not longer than `open_s`: what it returns
        later is closed at once. Where a connection breaks around OPEN, the same OPEN may come again,
        also before `closed` for the first: of equal attempts the later one counts.
        """
        ...

    def closed(self, outgoing: Outgoing, error: TransferError | None) -> None:
        """The pull is over and no thread of the transport touches its memory any more.

        Called exactly once for each `Outgoing` that `open` returned. `error` is None when the other
        side acknowledged everything. Must not raise.
        """
        ...


class Pull(Protocol):
    """One pull that runs. Its destination belongs to the transport until `wait_released` says True."""

    async def result(self) -> PullResult:
        """Every block is in its place and verified. Raises `TransferError` when that won't happen.

        After an error (or `abort`) the memory may still be written to: await `wait_released` before
        anyone else gets it. After a result it is free. May be awaited any number of times; cancelling
        the wait does not abort the pull.
        """
        ...

    def abort(self) -> None:
        """Force the connection closed. Safe in any state, any number of times, from any thread.

        `result` raises `AbortedError` from now on, unless the pull was already over.
        """
        ...

    async def wait_released(self) -> bool:
        """True: no byte can be written to the destination any more. Changes nothing.

        False: `release_s` passed without that proof; the caller must quarantine the blocks. Call it
        once the pull is over or aborted.
        """
        ...


class Transport(Protocol):
    """Moves blocks between two memories. Serves and pulls at once; belongs to one event loop."""

    @property
    def name(self) -> str:
        """What metrics call it: tcp, inproc, ..."""
        ...

    async def listen(self, host: str, port: int, source: KvSource) -> str:
        """Serve pulls from `source` from now on; gives the address that was bound (port 0: any).

        Raises OSError when the address can't be bound, RuntimeError once closed.
        """
        ...

    def pull(self, address: str, request: OpenRequest, blocks: Sequence[memoryview]) -> Pull:
        """Start to fill `blocks`: one writable, contiguous view per block, all of one size, in order.

        Never blocks, and fails only through the pull, except that blocks of another form than that
        raise ValueError.
        """
        ...

    async def close(self) -> None:
        """Abort every pull in both directions and end every thread. Safe to call again."""
        ...
