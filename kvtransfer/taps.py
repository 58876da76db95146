"""Where a test may reach into a transport: between the protocol and the wire. `faulty.py` uses it."""

from __future__ import annotations

from typing import Protocol

from kvtransfer.frames import FrameType


class Taps(Protocol):
    """Called by transfer threads, never by the loop. Each may block, which holds its thread."""

    def sending(self, kind: FrameType, index: int) -> bool:
        """Before a frame leaves. False swallows it. An OSError is taken for the connection's."""
        ...

    def writing(self, index: int) -> None:
        """Before block `index` is written into its destination."""
        ...

    def arrived(self, index: int, block: memoryview) -> None:
        """Block `index` is in its destination and not yet verified. May change it."""
        ...


class NoTaps:
    """Lets everything through."""

    def sending(self, kind: FrameType, index: int) -> bool:
        return True

    def writing(self, index: int) -> None:
        pass

    def arrived(self, index: int, block: memoryview) -> None:
        pass
