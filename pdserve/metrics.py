"""A worker's own `/metrics`: gauges and counters read from its state at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.worker_state import WorkerState

_LABELS = ("model_name", "role", "worker")


class WorkerCollector(Collector):
    """The worker's series of docs/metrics.md."""

    def __init__(self, state: WorkerState, model_name: str) -> None:
        self._state = state
        self._labels = (model_name, state.role, state.worker_id)

    def collect(self) -> Iterator[Metric]:
        load = self._state.load()
        held = load.num_blocks - load.kv_blocks["free"]
        counters = self._state.puller.counters
        yield self._gauge("pdserve_num_requests_waiting", "Requests that wait for blocks or a place", load.num_waiting)
        yield self._gauge("pdserve_num_requests_running", "Requests in the running batch", load.num_running)
        yield self._gauge("pdserve_kv_cache_usage_ratio", "Blocks that are not free, of all", held / load.num_blocks)
        yield self._gauge("pdserve_step_age_seconds", "How long the running step has been running", load.step_age_s)
        blocks = GaugeMetricFamily(
            "pdserve_kv_blocks", "KV blocks by state; the sum is the pool", labels=(*_LABELS, "state")
        )
        for name, number in load.kv_blocks.items():
            blocks.add_metric((*self._labels, name), number)
        yield blocks
        yield self._counter(
            "pdserve_preemptions", "Sequences whose blocks were taken and that are computed again", load.num_preemptions
        )
        yield self._counter(
            "pdserve_worker_prompt_tokens", "Prompt tokens computed by this worker", load.num_prompt_tokens
        )
        yield self._counter(
            "pdserve_worker_generation_tokens", "Tokens sampled by this worker", load.num_generation_tokens
        )
        yield self._counter(
            "pdserve_kv_checksum_failures", "Blocks whose bytes were not those sent", counters.num_checksum_failures
        )
        moved = CounterMetricFamily(
            "pdserve_kv_transfer_bytes", "KV bytes that arrived", labels=(*_LABELS, "transport")
        )
        moved.add_metric((*self._labels, self._state.puller.transport_name), counters.num_bytes)
        yield moved
        yield self._counter("pdserve_kv_transfers", "Pulls that arrived whole", counters.num_pulls)
        failures = CounterMetricFamily("pdserve_kv_transfer_failures", "Pulls that failed", labels=(*_LABELS, "reason"))
        for reason, number in self._state.puller.failures.items():
            failures.add_metric((*self._labels, reason), number)
        yield failures

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family


class MetricsServer:
    """Serves one worker's `/metrics` from a thread of its own, from when it is made until `close`."""

    def __init__(self, host: str, port: int, state: WorkerState, model_name: str) -> None:
        registry = CollectorRegistry()
        registry.register(WorkerCollector(state, model_name))
        self._server, self._thread = start_http_server(port, host, registry)
        self.port = self._server.server_port

    def close(self) -> None:
        """Blocks for up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
