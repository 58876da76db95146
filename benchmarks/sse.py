"""Server-sent events from bytes, each with the time at which its last byte was here.

While a reply runs, its bytes are only put aside with their time; they are split when the round is
over. So the load generator does nothing between two chunks that the server could have done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Read = tuple[float, bytes]  # when, what


@dataclass(frozen=True, slots=True)
class Event:
    """`data` without its field name; the lines of a longer one are joined. `arrived_at` is of the reader's clock."""

    data: bytes
    arrived_at: float


def events(reads: Iterable[Read]) -> Iterator[Event]:
    """The events with data, in order. Lines may end with LF or CRLF; an event that wasn't ended is none."""
    rest = b""
    data: list[bytes] = []
    for arrived_at, chunk in reads:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield Event(b"\n".join(data), arrived_at)
                data = []
