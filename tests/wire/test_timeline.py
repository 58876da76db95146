"""The phases of a request add up to what its client measured."""

from __future__ import annotations

import json

import pytest

from pdserve_wire.messages import DecodeTimings, KvComplete, PrefillTimings
from pdserve_wire.timeline import PHASES, RequestTimeline


def make_timeline(**changes: object) -> RequestTimeline:
    """A request that both pools served: times in seconds from 100."""
    timeline = RequestTimeline(
        "r1",
        arrived_at=100.0,
        tokenized_at=100.001,
        admitted_at=100.003,
        token_times=[100.5, 100.6, 100.62, 100.7],
        ended_at=100.71,
        decision="remote",
        prefill=PrefillTimings(queue_s=0.1, prefill_s=0.35),
        transfer=KvComplete("tcp", 1000, 2, 0.05, 0.02, 0.01, 0.03, 1),
        decode=DecodeTimings(decode_queue_s=0.015, first_step_s=0.025),
    )
    for name, value in changes.items():
        setattr(timeline, name, value)
    return timeline


def test_the_phases_add_up_to_ttft_and_to_the_gap() -> None:
    timeline = make_timeline()
    phases = timeline.phases()
    assert tuple(phases) == PHASES
    assert sum(phases[name] for name in PHASES[:5]) == pytest.approx(0.5)
    assert sum(phases[name] for name in PHASES[5:]) == pytest.approx(0.1)
    assert timeline.ttft_s == pytest.approx(0.5)
    assert timeline.handoff_gap_s == pytest.approx(0.1)
    assert timeline.tpot_s == pytest.approx(0.2 / 3)
    assert timeline.e2e_s == pytest.approx(0.71)


def test_a_request_without_a_handoff_has_no_gap() -> None:
    timeline = make_timeline(decision="local", transfer=None)
    assert timeline.handoff_gap_s == 0.0
    assert tuple(timeline.phases()) == PHASES[:5]


def test_a_resumed_request_does_not_explain_its_gap() -> None:
    assert tuple(make_timeline(resume_reasons=["LOST_PEER"]).phases()) == PHASES[:5]


def test_one_token_has_neither_gap_nor_tpot() -> None:
    timeline = make_timeline(token_times=[100.5])
    assert timeline.handoff_gap_s is None
    assert timeline.tpot_s is None


def test_what_is_not_known_yet_is_left_out() -> None:
    timeline = RequestTimeline("r1")
    assert timeline.phases() == {}
    assert (timeline.ttft_s, timeline.e2e_s, timeline.num_output_tokens) == (None, None, 0)
    json.dumps(timeline.as_dict())
    json.dumps(make_timeline().as_dict())
