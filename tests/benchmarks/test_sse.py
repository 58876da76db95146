"""The reader of server-sent events: where events end, and when they were here."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sse import events

STREAM = b': a comment\r\ndata: {"a": 1}\r\n\r\nevent: note\nid: 7\ndata:one\ndata: two\n\n\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


def test_an_event_is_its_data_lines_without_the_field_name() -> None:
    assert [event.data for event in events([(0.0, STREAM)])] == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_wherever_the_network_cuts(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reads = [(float(number), STREAM[start:end]) for number, (start, end) in enumerate(pairwise(edges))]
    assert [event.data for event in events(reads)] == EVENTS


def test_an_event_has_the_time_of_its_last_byte() -> None:
    reads = [(1.0, b"data: x\n"), (2.0, b"\ndata: y\n\ndata: z\n\n")]
    assert [(event.data, event.arrived_at) for event in events(reads)] == [(b"x", 2.0), (b"y", 2.0), (b"z", 2.0)]


@pytest.mark.parametrize("rest", [b"data: half", b"data: whole line\n"])
def test_an_event_that_was_not_ended_is_none(rest: bytes) -> None:
    assert [event.data for event in events([(0.0, b"data: x\n\n"), (1.0, rest)])] == [b"x"]


def test_only_a_first_space_is_taken_from_data() -> None:
    assert [event.data for event in events([(0.0, b"data:  x \n\n")])] == [b" x "]
