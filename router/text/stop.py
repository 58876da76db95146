"""Stop strings: where they are looked for, and what must be held back until they can't come."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text at the first stop string, of which nothing is let out.

    The first is the one that ends first; of two that end together, the one that starts first. That
    does not depend on how the stream was split.

        text so far:   ... let out ... | held back | unseen
                                       ^ the longest suffix that could begin a stop string
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string stops nothing"
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to let out, and whether a stop string was met: then nothing follows."""
        if not self._stops:
            return text, False
        window = self._held + text if self._held else text
        start = self._find(window)
        if start is not None:
            self._held = ""
            return window[:start], True
        keep = self._hold_from(window)
        self._held = window[keep:]
        return window[:keep], False

    def flush(self) -> str:
        """What was held back, when no more text can come."""
        held, self._held = self._held, ""
        return held

    def _find(self, window: str) -> int | None:
        """Where the first stop string starts. It can't start before the window (see `_hold_from`)."""
        hits = ((start + len(stop), start) for stop in self._stops if (start := window.find(stop)) >= 0)
        first = min(hits, default=None)
        return None if first is None else first[1]

    def _hold_from(self, window: str) -> int:
        """Where the longest suffix starts that is the beginning of a stop string."""
        keep = len(window)
        for stop in self._stops:
            start = max(0, len(window) - len(stop) + 1)
            while (start := window.find(stop[0], start, keep)) >= 0:
                if stop.startswith(window[start:]):
                    keep = start
                    break
                start += 1
        return keep
