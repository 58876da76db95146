"""What a person sees of a request's time and of a server's workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdserve.tables import BAR_WIDTH, draw_status, draw_timeline
from pdserve_wire.messages import DecodeTimings, KvComplete, PrefillTimings
from pdserve_wire.timeline import PHASES, RequestTimeline


def make_timeline(**changes: Any) -> dict[str, Any]:
    timeline = RequestTimeline("chatcmpl-1", arrived_at=100.0)
    timeline.tokenized_at, timeline.admitted_at = 100.001, 100.002
    timeline.token_times = [100.05, 100.08, 100.1, 100.12]
    timeline.ended_at, timeline.outcome, timeline.decision = 100.125, "stop", "remote"
    timeline.prefill_worker, timeline.decode_worker, timeline.num_prompt_tokens = "prefill-0", "decode-0", 37
    timeline.prefill = PrefillTimings(queue_s=0.003, prefill_s=0.04)
    timeline.transfer = KvComplete("tcp", 1_105_920, 3, 0.0035, 0.004, 0.001, 0.0, 2)
    timeline.decode = DecodeTimings(decode_queue_s=0.002, first_step_s=0.02)
    for name, value in changes.items():
        setattr(timeline, name, value)
    return timeline.as_dict()


def test_a_timeline_has_each_phase_and_each_figure() -> None:
    drawn = draw_timeline(make_timeline(), "#")
    lines = drawn.splitlines()
    assert lines[0] == ("timeline of chatcmpl-1: 37 prompt and 4 output tokens, prefill-0 -> decode-0, stop")
    words = [line.split() for line in lines if line.strip()]
    phases = [row[0] for row in words if row[0] in PHASES]
    assert phases == list(PHASES)
    figures = {row[0]: " ".join(row[1:]) for row in words}
    assert figures["TTFT"] == "50.0 ms to the first token"
    assert figures["TPOT"] == "23.3 ms for each token after the first"
    assert figures["hand-off"] == "gap 30.0 ms from the first token to the second"
    assert figures["whole"] == "125.0 ms 32.0 tokens/s"
    assert figures["KV"] == "moved 1.1 MB by tcp: 3 blocks in 3.5 ms, 2 of them before prefill ended"


def test_bars_stand_where_their_phase_was() -> None:
    rows = [line for line in draw_timeline(make_timeline(), "#").splitlines() if line.endswith(("#", "|"))]
    columns = [(len(row) - len(row.rstrip("#|")), row.rstrip()) for row in rows]
    assert len({len(row.partition(" ms  ")[0]) for row in rows}) == 1  # aligned
    first = rows[0].index("|")
    prefill = next(row for row in rows if " prefill " in row)
    assert prefill.count("#") == round(0.045 / 0.125 * BAR_WIDTH) - round(0.005 / 0.125 * BAR_WIDTH)
    last = rows[-1]
    assert last.strip().startswith("tokens 3 to 4")
    assert len(last) == first + BAR_WIDTH
    assert all(length >= 1 for length, _ in columns)


def test_a_request_that_moved_nothing_says_so() -> None:
    drawn = draw_timeline(make_timeline(decision="local", transfer=None, prefill_worker=""), "#")
    assert "decode-0 alone" in drawn
    assert "the prompt was read where the reply was written" in drawn
    assert "hand-off gap" not in drawn
    assert "tokens 2 to 4" in drawn


def test_a_timeline_with_hardly_anything_can_be_drawn() -> None:
    drawn = draw_timeline(RequestTimeline("r1").as_dict())
    assert "timeline of r1" in drawn
    assert "resumed" not in drawn
    assert "resumed 2 times" in draw_timeline(make_timeline(resume_reasons=["KV_LOST", "LOST_PEER"]))
    assert "resumed once" in draw_timeline(make_timeline(resume_reasons=["KV_LOST"]))


def make_worker(**changes: Any) -> dict[str, Any]:
    worker = {
        "worker_id": "decode-0",
        "role": "decode",
        "grpc_address": "127.0.0.1:4242",
        "pid": 7,
        "is_ready": True,
        "is_draining": False,
        "num_running": 3,
        "num_waiting": 1,
        "kv_blocks": {"free": 90, "used": 10, "cached": 12, "step": 0},
        "num_blocks": 112,
        "age_s": 0.25,
    }
    return worker | changes


def test_status_is_a_line_a_worker() -> None:
    workers = [make_worker(), make_worker(worker_id="prefill-10", role="prefill", is_draining=True)]
    router = {"model": "smol", "num_in_flight": 2, "why_not_ready": None}
    lines = draw_status({"router": router, "workers": workers}).splitlines()
    assert lines[0] == "router ready; smol; 2 requests in flight"
    assert lines[2].split()[:5] == ["WORKER", "ROLE", "STATE", "RUNNING", "WAITING"]
    assert lines[3].split()[:5] == ["decode-0", "decode", "ready", "3", "1"]
    assert "90 of 112 free, 10 used, 12 cached" in lines[3]
    assert lines[4].split()[:3] == ["prefill-10", "prefill", "draining"]
    assert lines[3].index("127.0.0.1:4242") == lines[4].index("127.0.0.1:4242")


def test_status_says_why_a_server_is_not_ready() -> None:
    drawn = draw_status({"router": {"model": "smol", "why_not_ready": "no decode worker is ready"}, "workers": []})
    assert drawn.splitlines()[0].startswith("router not ready: no decode worker is ready")
    assert drawn.endswith("no workers have joined")
    assert "not ready" in draw_status({"router": {}, "workers": [make_worker(is_ready=False, kv_blocks={})]})


def test_sizes_have_fitting_units() -> None:
    transfer = KvComplete("tcp", 999, 1, 0.0, 0.0, 0.0, 0.0, 0)
    assert "999 B " in draw_timeline(make_timeline(transfer=transfer))
    assert "25.60 GB" in draw_timeline(make_timeline(transfer=replace(transfer, num_bytes=25_600_000_000)))
