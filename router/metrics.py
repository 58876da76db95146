"""The router's series (docs/metrics.md), in a registry of their own that is passed around."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdserve_wire.messages import WorkerLoad
from pdserve_wire.timeline import PHASES, RequestTimeline

OUTCOMES = ("stop", "length", "abort", "error", "rejected")
DECISIONS = ("remote", "local")
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)
# what the field's dashboards and gateways look for
VLLM_NAMES = {
    "pdserve_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "pdserve_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "pdserve_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "pdserve_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "pdserve_prompt_tokens": "vllm:prompt_tokens",
    "pdserve_generation_tokens": "vllm:generation_tokens",
    "pdserve_num_requests_running": "vllm:num_requests_running",
    "pdserve_num_requests_waiting": "vllm:num_requests_waiting",
    "pdserve_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
}
_REMAINDERS = ("relay", "gap_relay")  # the phases that no clock measures; they can't be negative
_MIN_REMAINDER_S = -0.001

WorkerRow = tuple[str, str, WorkerLoad]  # worker id, role, last report


class RouterMetrics:
    """Counts each client request once, when it has ended."""

    def __init__(
        self, model_name: str, registry: CollectorRegistry | None = None, has_vllm_names: bool = False
    ) -> None:
        """`has_vllm_names`: show the series of `VLLM_NAMES` under those names, too."""
        self.registry = registry if registry is not None else CollectorRegistry()
        self.model_name = model_name
        self._shown = _Shown(self.registry, has_vllm_names)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(name, text, ("model_name", *labels), buckets=BUCKETS, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=self.registry)

        ttft = histogram("pdserve_time_to_first_token_seconds", "Arrival to first token at the router.", "stream")
        self._ttft = {flag: ttft.labels(model_name, str(flag).lower()) for flag in (True, False)}
        ttfb = histogram("pdserve_time_to_first_byte_seconds", "Arrival to first byte of the reply's body.", "stream")
        self._ttfb = {flag: ttfb.labels(model_name, str(flag).lower()) for flag in (True, False)}
        self._itl = _GapHistogram("pdserve_inter_token_latency_seconds", "Time between two tokens.", model_name)
        self.registry.register(self._itl)
        self._tpot = histogram(
            "pdserve_time_per_output_token_seconds", "Mean time of a token after the first, by request."
        ).labels(model_name)
        self._e2e = histogram("pdserve_e2e_request_latency_seconds", "Arrival to the reply's end.").labels(model_name)
        self._gap = histogram("pdserve_handoff_gap_seconds", "Token 0 to token 1.").labels(model_name)
        phases = histogram("pdserve_request_phase_seconds", "Where the time went.", "phase")
        self._phases = {phase: phases.labels(model_name, phase) for phase in PHASES}
        negatives = counter("pdserve_negative_phases", "Remainders below -1 ms: a clock or a sum is wrong.", "phase")
        self._negatives = {phase: negatives.labels(model_name, phase) for phase in _REMAINDERS}
        requests = counter("pdserve_requests", "Requests that have ended.", "outcome")
        self._requests = {outcome: requests.labels(model_name, outcome) for outcome in OUTCOMES}
        self._in_flight = Gauge(
            "pdserve_requests_in_flight", "Requests that have not ended.", ("model_name",), registry=self.registry
        ).labels(model_name)
        self._resumed = counter("pdserve_resumed_requests", "Requests rebuilt after a loss.", "reason")
        self._prompt = counter("pdserve_prompt_tokens", "Prompt tokens of served requests.").labels(model_name)
        self._cached = counter("pdserve_cached_prompt_tokens", "Prompt tokens found cached.").labels(model_name)
        self._generated = counter("pdserve_generation_tokens", "Tokens generated.").labels(model_name)
        decisions = counter("pdserve_disaggregation_decisions", "Who prefilled: the pool, or decode.", "decision")
        self._decisions = {decision: decisions.labels(model_name, decision) for decision in DECISIONS}

    def arrived(self) -> None:
        """A request is in flight, until `observe`."""
        self._in_flight.inc()

    def observe(self, timeline: RequestTimeline, is_stream: bool, first_byte_at: float | None = None) -> None:
        """Count an ended request, exactly once; its timeline has an outcome and an end."""
        self._in_flight.dec()
        self._requests[timeline.outcome].inc()
        for reason in timeline.resume_reasons:
            self._resumed.labels(self.model_name, reason).inc()
        if timeline.decision:
            self._decisions[timeline.decision].inc()
        if timeline.e2e_s is not None:
            self._e2e.observe(timeline.e2e_s)
        for phase, seconds in timeline.phases().items():
            self._phases[phase].observe(seconds)
            if phase in _REMAINDERS and seconds < _MIN_REMAINDER_S:
                self._negatives[phase].inc()
        if timeline.ttft_s is None:
            return
        self._ttft[is_stream].observe(timeline.ttft_s)
        if first_byte_at is not None:
            self._ttfb[is_stream].observe(first_byte_at - timeline.arrived_at)
        self._itl.observe(timeline.token_times)
        if timeline.tpot_s is not None:
            self._tpot.observe(timeline.tpot_s)
        if timeline.handoff_gap_s is not None:
            self._gap.observe(timeline.handoff_gap_s)
        self._prompt.inc(timeline.num_prompt_tokens)
        self._cached.inc(num_cached_tokens(timeline))
        self._generated.inc(timeline.num_output_tokens)

    def exposition(self) -> tuple[bytes, str]:
        """All series, and their content type, in Prometheus' text format."""
        return generate_latest(self._shown), CONTENT_TYPE_PLAIN_0_0_4


def num_cached_tokens(timeline: RequestTimeline) -> int:
    """Prompt tokens that prefill really found cached, whichever worker did it."""
    timings = timeline.prefill or (timeline.decode.prefill if timeline.decode else None)
    return timings.num_cached_tokens if timings else 0


class _GapHistogram(Collector):
    """A histogram of the gaps in a run of times, filled a whole run at once.

    `Histogram.observe` for each gap would stop the event loop for 10 ms at the end of a long reply.
    """

    def __init__(self, name: str, text: str, model_name: str) -> None:
        self._name = name
        self._text = text
        self._model_name = model_name
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, times: list[float]) -> None:
        """`times` in rising order; n of them have n - 1 gaps."""
        if len(times) < 2:
            return
        counts, bounds, last = self._counts, BUCKETS, times[0]
        for now in times[1:]:
            counts[bisect_left(bounds, now - last)] += 1
            last = now
        self._sum += times[-1] - times[0]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        bounds = [*map(floatToGoString, BUCKETS), "+Inf"]
        family.add_metric([self._model_name], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class WorkerGauges(Collector):
    """Each worker's gauges as of its last report, so that one scrape target is enough on a laptop."""

    def __init__(self, model_name: str, rows: Callable[[], Iterable[WorkerRow]]) -> None:
        """`rows` is called at each scrape, on the event loop's thread."""
        self._model_name = model_name
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "role", "worker")
        waiting = GaugeMetricFamily("pdserve_num_requests_waiting", "Requests in a worker's queue.", labels=labels)
        running = GaugeMetricFamily("pdserve_num_requests_running", "Requests in a worker's batch.", labels=labels)
        usage = GaugeMetricFamily("pdserve_kv_cache_usage_ratio", "Blocks neither free nor cached.", labels=labels)
        blocks = GaugeMetricFamily("pdserve_kv_blocks", "KV blocks by state.", labels=(*labels, "state"))
        for worker_id, role, load in self._rows():
            row = [self._model_name, role, worker_id]
            waiting.add_metric(row, load.num_waiting)
            running.add_metric(row, load.num_running)
            usage.add_metric(row, _usage(load))
            for state, count in load.kv_blocks.items():
                blocks.add_metric([*row, state], count)
        yield from (waiting, running, usage, blocks)


def _usage(load: WorkerLoad) -> float:
    if not load.num_blocks:
        return 0.0
    return 1.0 - (load.kv_blocks.get("free", 0) + load.kv_blocks.get("cached", 0)) / load.num_blocks


class _Shown(Collector):
    """A registry's series as they are shown: without times of creation, and some under vLLM's names, too."""

    def __init__(self, registry: CollectorRegistry, has_vllm_names: bool) -> None:
        self._registry = registry
        self._aliases = VLLM_NAMES if has_vllm_names else {}

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            if family.name in self._aliases:
                name = self._aliases[family.name]
                alias = Metric(name, family.documentation, family.type)
                alias.samples = [
                    sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in family.samples
                ]
                yield alias
