"""A transport with faults on order: for the tests of whatever stands on the seam.

The faults are made between the protocol and the wire (`taps.py`), so what a test sees is how the real
transport deals with them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.frames import FrameType
from kvtransfer.messages import OpenRequest, PullResult
from kvtransfer.taps import Taps
from kvtransfer.transport import KvSource, Pull, Transport


class TappedTransport(Transport, Protocol):
    """What every transport of this package is, besides a `Transport`."""

    def tap(self, taps: Taps) -> None:
        """Put these hooks into every connection that is made from now on."""
        ...


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong on the side that is wrapped. Nothing, by default."""

    delay_s: float = 0.0  # this long before each write of `delay_block`, whatever is aborted meanwhile
    delay_block: int = 0
    flip_block: int | None = None  # one bit of this block changes on its way, ...
    num_flips: int = 1  # ... in so many pulls
    raise_on: FrameType | None = None  # sending this frame raises
    swallow: frozenset[FrameType] = frozenset()  # these are never sent: accept, then silence
    hold_on: FrameType | None = None  # the thread stops before it sends this, until `let_go`
    is_release_refused: bool = False  # `Pull.wait_released` says False


class FaultyTransport:
    """Does what `inner` does, and what the plan says."""

    def __init__(self, inner: TappedTransport, plan: FaultPlan) -> None:
        self.name = inner.name
        self._inner = inner
        self._plan = plan
        self._faults = _Faults(plan)
        inner.tap(self._faults)

    async def listen(self, host: str, port: int, source: KvSource) -> str:
        return await self._inner.listen(host, port, source)

    def pull(self, address: str, request: OpenRequest, blocks: Sequence[memoryview]) -> Pull:
        pull = self._inner.pull(address, request, blocks)
        return _UnreleasedPull(pull) if self._plan.is_release_refused else pull

    async def close(self) -> None:
        self.let_go()
        await self._inner.close()

    def let_go(self) -> None:
        """Threads that `hold_on` stopped go on, and none is stopped any more."""
        self._faults.held.set()


class _Faults:
    """The plan as `Taps`."""

    def __init__(self, plan: FaultPlan) -> None:
        self.held = threading.Event()
        self._plan = plan
        self._lock = threading.Lock()
        self._num_flips = plan.num_flips

    def sending(self, kind: FrameType, index: int) -> bool:
        if kind is self._plan.hold_on:
            self.held.wait()
        if kind is self._plan.raise_on:
            raise OSError("sending failed, as planned")
        return kind not in self._plan.swallow

    def writing(self, index: int) -> None:
        if self._plan.delay_s and index == self._plan.delay_block:
            threading.Event().wait(self._plan.delay_s)

    def arrived(self, index: int, block: memoryview) -> None:
        if index != self._plan.flip_block:
            return
        with self._lock:
            if self._num_flips == 0:
                return
            self._num_flips -= 1
        block[block.nbytes // 2] ^= 1


class _UnreleasedPull:
    def __init__(self, inner: Pull) -> None:
        self._inner = inner

    async def result(self) -> PullResult:
        return await self._inner.result()

    def abort(self) -> None:
        self._inner.abort()

    async def wait_released(self) -> bool:
        await self._inner.wait_released()
        return False
