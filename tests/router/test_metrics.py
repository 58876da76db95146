from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve_wire.errors import Reason, Unavailable
from pdserve_wire.messages import DecodeTimings, KvComplete, PrefillTimings, WorkerLoad
from pdserve_wire.timeline import RequestTimeline
from router.metrics import BUCKETS, OUTCOMES, VLLM_NAMES, RouterMetrics, WorkerGauges
from router.served_model import ServedModel
from router.timelines import Timelines
from tests.router.makers import MODEL, ScriptedGenerator, make_front, one_by_one, post, saying, serving


def make_timeline(outcome: str = "stop", **fields: Any) -> RequestTimeline:
    """Three tokens: the first after 100 ms, the second 49 ms and the third 10 ms later."""
    values: dict[str, Any] = {
        "arrived_at": 10.0,
        "tokenized_at": 10.01,
        "admitted_at": 10.02,
        "token_times": [10.1, 10.149, 10.159],
        "ended_at": 10.2,
        "decision": "remote",
        "num_prompt_tokens": 32,
        "prefill": PrefillTimings(queue_s=0.01, prefill_s=0.06, num_cached_tokens=16),
        "transfer": KvComplete("tcp", 100, 2, 0.02, 0.01, 0.005, 0.01, 1),
        "decode": DecodeTimings(0.005, 0.02),
    }
    return RequestTimeline("r", outcome=outcome, **(values | fields))


class Observed:
    """One timeline as the series have it."""

    def __init__(self, timeline: RequestTimeline, is_stream: bool = True, first_byte_at: float | None = 10.11) -> None:
        self.metrics = RouterMetrics(MODEL)
        self.metrics.arrived()
        self.metrics.observe(timeline, is_stream, first_byte_at)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"model_name": MODEL} | labels)


def test_ttft_is_one_sample_a_request_and_its_phases_add_up_to_it() -> None:
    observed = Observed(make_timeline())
    assert observed("pdserve_time_to_first_token_seconds_count", stream="true") == 1
    assert observed("pdserve_time_to_first_token_seconds_count", stream="false") == 0
    ttft = observed("pdserve_time_to_first_token_seconds_sum", stream="true")
    phases = ("tokenize", "admission", "prefill_queue", "prefill", "relay")
    parts = [observed("pdserve_request_phase_seconds_sum", phase=phase) for phase in phases]
    assert ttft == pytest.approx(0.1) and sum(part or 0.0 for part in parts) == pytest.approx(ttft)


def test_the_handoff_gap_and_its_phases_add_up() -> None:
    observed = Observed(make_timeline())
    gap = observed("pdserve_handoff_gap_seconds_sum")
    phases = ("transfer_exposed", "decode_queue", "first_step", "gap_relay")
    parts = [observed("pdserve_request_phase_seconds_sum", phase=phase) for phase in phases]
    assert gap == pytest.approx(0.049) and sum(part or 0.0 for part in parts) == pytest.approx(gap)


def test_a_local_request_has_a_gap_of_0() -> None:
    observed = Observed(make_timeline(decision="local", transfer=None))
    assert observed("pdserve_handoff_gap_seconds_count") == 1
    assert observed("pdserve_handoff_gap_seconds_sum") == 0
    assert observed("pdserve_disaggregation_decisions_total", decision="local") == 1
    assert observed("pdserve_disaggregation_decisions_total", decision="remote") == 0


def test_latencies_and_tokens_are_counted() -> None:
    observed = Observed(make_timeline())
    assert observed("pdserve_inter_token_latency_seconds_count") == 2
    assert observed("pdserve_inter_token_latency_seconds_sum") == pytest.approx(0.059)
    assert observed("pdserve_inter_token_latency_seconds_bucket", le="0.02") == 1
    assert observed("pdserve_inter_token_latency_seconds_bucket", le="0.05") == 2
    assert observed("pdserve_inter_token_latency_seconds_bucket", le="+Inf") == 2
    assert observed("pdserve_time_per_output_token_seconds_sum") == pytest.approx(0.0295)
    assert observed("pdserve_e2e_request_latency_seconds_sum") == pytest.approx(0.2)
    assert observed("pdserve_time_to_first_byte_seconds_sum", stream="true") == pytest.approx(0.11)
    assert observed("pdserve_prompt_tokens_total") == 32
    assert observed("pdserve_cached_prompt_tokens_total") == 16
    assert observed("pdserve_generation_tokens_total") == 3


def test_a_locally_prefilled_request_counts_what_decode_found_cached() -> None:
    decode = DecodeTimings(prefill=PrefillTimings(num_cached_tokens=8))
    assert Observed(make_timeline(prefill=None, decode=decode))("pdserve_cached_prompt_tokens_total") == 8


def test_a_remainder_below_minus_1_ms_is_counted() -> None:
    slow = PrefillTimings(queue_s=0.01, prefill_s=0.5)
    assert Observed(make_timeline(prefill=slow))("pdserve_negative_phases_total", phase="relay") == 1
    assert Observed(make_timeline())("pdserve_negative_phases_total", phase="relay") == 0


def test_buckets_cover_1_ms_to_60_s() -> None:
    assert (BUCKETS[0], BUCKETS[-1]) == (0.001, 60.0)


def test_every_outcome_is_there_from_the_start() -> None:
    registry = RouterMetrics(MODEL).registry
    for outcome in OUTCOMES:
        labels = {"model_name": MODEL, "outcome": outcome}
        assert registry.get_sample_value("pdserve_requests_total", labels) == 0


def test_resumes_are_counted_by_reason() -> None:
    metrics = RouterMetrics(MODEL)
    metrics.arrived()
    metrics.observe(make_timeline(resume_reasons=["LOST_PEER"]), True)
    labels = {"model_name": MODEL, "reason": "LOST_PEER"}
    assert metrics.registry.get_sample_value("pdserve_resumed_requests_total", labels) == 1


def test_the_series_may_be_shown_under_vllms_names_too() -> None:
    metrics = RouterMetrics(MODEL, has_vllm_names=True)
    load = WorkerLoad(num_running=3, num_blocks=4, kv_blocks={"free": 1})
    metrics.registry.register(WorkerGauges(MODEL, lambda: [("d0", "decode", load)]))
    metrics.arrived()
    metrics.observe(make_timeline(), True)
    families = list(text_string_to_metric_families(metrics.exposition()[0].decode()))
    assert not any(family.name.endswith("_created") for family in families)
    assert set(VLLM_NAMES.values()) <= {family.name for family in families}
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    assert samples["vllm:num_requests_running"] == 3 and samples["vllm:kv_cache_usage_perc"] == 0.75
    assert samples["vllm:prompt_tokens_total"] == 32 and samples["vllm:e2e_request_latency_seconds_count"] == 1
    assert "vllm:" not in RouterMetrics(MODEL).exposition()[0].decode()


def test_a_long_reply_is_observed_in_a_few_milliseconds() -> None:
    metrics = RouterMetrics(MODEL)
    timeline = make_timeline(token_times=[10.1 + 0.01 * place for place in range(8192)])
    started = time.perf_counter()
    metrics.observe(timeline, True)
    assert time.perf_counter() - started < 0.05


async def test_aborted_failed_rejected_and_finished_requests_reconcile(model: ServedModel) -> None:
    bodies: list[Any] = [{"model": MODEL, "prompt": prompt} for prompt in ("a", "b", "", "c", "d")]
    tokens = one_by_one(model.tokenizer.encode(" x y"))
    scripts = iter([tokens, [Unavailable(Reason.BUSY, "full")], [Unavailable(Reason.KV_LOST, "gone")], tokens[:1]])
    async with serving(make_front(model, ScriptedGenerator(lambda request: next(scripts)))) as served:
        statuses = [(await post(served.port, body)).status for body in [*bodies, b"{"]]
        counted = served.counted()
    assert statuses == [200, 429, 400, 503, 503, 400]
    assert counted.pop("in flight") == 0
    assert counted == {"length": 1, "rejected": 3, "error": 2} and sum(counted.values()) == len(statuses)


async def test_ttft_is_observed_for_whole_answers_too(model: ServedModel) -> None:
    front = make_front(model, saying(model, " one two"))
    async with serving(front) as served:
        for is_stream in (True, False, False):
            await post(served.port, {"model": MODEL, "prompt": "Once", "stream": is_stream})
    for label, count in (("true", 1), ("false", 2)):
        for series in ("pdserve_time_to_first_token_seconds_count", "pdserve_time_to_first_byte_seconds_count"):
            labels = {"model_name": MODEL, "stream": label}
            assert front.metrics.registry.get_sample_value(series, labels) == count


def test_the_timelines_are_a_ring() -> None:
    timelines = Timelines(num_kept=2)
    for number in range(3):
        timelines.add(make_timeline() if number else RequestTimeline("first"), client_id=f"c{number}")
    assert timelines.get("first") is None and timelines.get("c0") is None
    found = timelines.get("c2")
    assert found is not None and found["request_id"] == "r" and found["num_output_tokens"] == 3
    assert timelines.get("") is None
