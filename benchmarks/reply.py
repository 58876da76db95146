"""One streamed answer, as its client saw it.

A chunk is one token, unless the server says how many tokens the answer had so far (`usage` in a
chunk): then those of one chunk came at the same time. How many there were in all is the final
`usage`, or without one the number of chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.sse import Read, events

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Reply:
    """Times are seconds of the client's monotonic clock. `error` is empty for a whole answer."""

    sent_at: float
    ended_at: float
    token_times: tuple[float, ...] = ()
    num_chunks: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0  # 0: the server doesn't tell
    num_cached_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.token_times[0] - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (n - 1); None for fewer than two tokens."""
        if self.num_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.num_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """The gap before each token but the first; 0 between two of one chunk."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


def read_reply(reads: Iterable[Read], sent_at: float, ended_at: float) -> Reply:
    """The reply in a stream of completion or chat chunks. What is wrong with it is the reply's `error`."""
    times: list[float] = []
    num_chunks = 0
    is_ended = is_counted = False
    error = ""
    usage: Mapping[str, Any] = {}
    for event in events(reads):
        if event.data == DONE:
            is_ended = True
            continue
        try:
            chunk = json.loads(event.data)
        except ValueError:
            error = error or f"a chunk that is not JSON: {event.data[:80]!r}"
            continue
        if failure := chunk.get("error"):
            error = error or str(failure.get("message", failure) if isinstance(failure, dict) else failure)
        usage = chunk.get("usage") or usage
        choices = chunk.get("choices")
        if not choices:
            continue
        is_last = bool(choices[0].get("finish_reason"))
        is_ended = is_ended or is_last
        # The last chunk may tell the sum: that says nothing of how many tokens this chunk has.
        is_counted = is_counted or (bool(chunk.get("usage")) and not is_last)
        num_new = usage["completion_tokens"] - len(times) if is_counted else int(_has_token(choices[0]))
        num_chunks += num_new > 0
        times += [event.arrived_at] * num_new
    if not error and not is_ended:
        error = "the stream broke off"
    if not error and not times:
        error = "no token came"
    return Reply(
        sent_at=sent_at,
        ended_at=ended_at,
        token_times=tuple(times),
        num_chunks=num_chunks,
        num_tokens=usage.get("completion_tokens", len(times)),
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        error=error,
    )


def _has_token(choice: Mapping[str, Any]) -> bool:
    """Text, or a token that has none yet (half a character); not the role that opens a chat, nor a bare end."""
    delta = choice.get("delta")
    if delta is None:
        text, is_role = choice.get("text"), False
    else:
        text, is_role = (
            delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"),
            "role" in delta,
        )
    return bool(text) or not (is_role or choice.get("finish_reason"))
