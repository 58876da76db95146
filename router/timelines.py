"""The latest requests' timelines, for `/debug/timeline/ID`."""

from __future__ import annotations

from collections import deque

from pdserve_wire.timeline import RequestTimeline


class Timelines:
    """A bounded ring of finished requests. Each is kept as a summary, without its token times."""

    def __init__(self, num_kept: int = 256) -> None:
        self._recent: deque[tuple[str, dict[str, object]]] = deque(maxlen=num_kept)

    def add(self, timeline: RequestTimeline, client_id: str = "") -> None:
        """Keep an ended timeline; `client_id` is the id that the client chose, if it did."""
        self._recent.append((client_id, timeline.as_dict()))

    def get(self, request_id: str) -> dict[str, object] | None:
        """By our id or the client's, the newest first; None where it is not (or no longer) known."""
        for client_id, summary in reversed(self._recent):
            if request_id in (client_id, summary["request_id"]):
                return summary
        return None
