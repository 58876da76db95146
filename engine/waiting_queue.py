"""Sequences that wait for blocks: preempted ones first, then by priority, then in order of arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.sequence import Sequence


class WaitingQueue:
    """Sorted at all times. A sequence's place is found by its order, which is unique."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        place = self._place(sequence)
        return place < len(self._sequences) and self._sequences[place] is sequence

    @property
    def head(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is in here."""
        del self._sequences[self._place(sequence)]

    def _place(self, sequence: Sequence) -> int:
        return bisect_left(self._sequences, _order(sequence), key=_order)


def _order(sequence: Sequence) -> tuple[bool, int, int]:
    return sequence.num_preemptions == 0, sequence.priority, sequence.arrival
