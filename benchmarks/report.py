"""Measurements as a person reads them: a markdown table, a row for each server and workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.round import Percentiles, Round, median_percentiles
from benchmarks.workload import Workload

_COLUMNS = (
    "server",
    "streams",
    "tok/s (min-max)",
    "TTFT p50/p95/p99 ms",
    "TPOT p50/p95/p99 ms",
    "ITL p50/p95/p99 ms",
    "failed",
    "busy cores: client/server/others/stolen",
)
_LEFT = 2  # columns of words
_QUIET_CORES = 0.1
_LIGHT_CORES = 0.25


@dataclass(frozen=True, slots=True)
class Measurement:
    """The repeated rounds of one workload on one server. Each figure is its median over the rounds."""

    label: str
    workload: Workload
    rounds: tuple[Round, ...]

    @property
    def tokens_per_s(self) -> float:
        return median(one.tokens_per_s for one in self.rounds)

    @property
    def num_requests(self) -> int:
        return sum(one.num_requests for one in self.rounds)

    @property
    def num_failed(self) -> int:
        return sum(one.num_failed for one in self.rounds)

    @property
    def ttft(self) -> Percentiles | None:
        return median_percentiles([one.ttft for one in self.rounds])

    @property
    def tpot(self) -> Percentiles | None:
        return median_percentiles([one.tpot for one in self.rounds])

    @property
    def itl(self) -> Percentiles | None:
        return median_percentiles([one.itl for one in self.rounds])

    def num_cores(self, name: str) -> float | None:
        """A field of `CpuTime`, in cores that it kept busy."""
        times = [(getattr(one.cpu, name), one.duration_s) for one in self.rounds]
        known = [cpu_s / duration_s for cpu_s, duration_s in times if cpu_s is not None]
        return median(known) if known else None

    @property
    def is_quiet(self) -> bool:
        """Whether little else ran on the machine, as far as is known."""
        return (self.num_cores("others_s") or 0.0) + (self.num_cores("steal_s") or 0.0) < _QUIET_CORES


_COMPARED: dict[str, Callable[[Measurement], float | None]] = {
    "tok/s": lambda one: one.tokens_per_s,
    "TTFT p50": lambda one: one.ttft.p50 if one.ttft else None,
    "TPOT p50": lambda one: one.tpot.p50 if one.tpot else None,
    "ITL p50": lambda one: one.itl.p50 if one.itl else None,
    "ITL p95": lambda one: one.itl.p95 if one.itl else None,
    "ITL p99": lambda one: one.itl.p99 if one.itl else None,
}


def table(measurements: Iterable[Measurement]) -> str:
    """A markdown table."""
    marks = ["---"] * _LEFT + ["---:"] * (len(_COLUMNS) - _LEFT)
    return "\n".join([_line(_COLUMNS), _line(marks), *map(row, measurements)])


def row(measurement: Measurement) -> str:
    """One row of `table`."""
    speeds = [one.tokens_per_s for one in measurement.rounds]
    return _line(
        (
            measurement.label,
            measurement.workload.name,
            f"{measurement.tokens_per_s:.1f} ({min(speeds):.1f}-{max(speeds):.1f})",
            _ms(measurement.ttft),
            _ms(measurement.tpot),
            _ms(measurement.itl),
            f"{measurement.num_failed} of {measurement.num_requests}",
            "/".join(
                _or_dash(measurement.num_cores(name), "{:.2f}")
                for name in ("client_s", "server_s", "others_s", "steal_s")
            ),
        )
    )


def ratio_table(measurements: Sequence[Measurement], base_label: str) -> str | None:
    """Each server's figures over those of `base_label` in the same workload; None where there is nothing to compare."""
    bases = {one.workload.name: one for one in measurements if one.label == base_label}
    pairs = [(one, bases[one.workload.name]) for one in measurements if one.workload.name in bases]
    pairs = [(one, base) for one, base in pairs if one is not base]
    if not pairs:
        return None
    columns = (f"over {base_label}", "streams", *_COMPARED)
    rows = [_line(columns), _line(["---"] * _LEFT + ["---:"] * (len(columns) - _LEFT))]
    for one, base in pairs:
        ratios = [_or_dash(_ratio(figure(one), figure(base)), "{:.2f}x") for figure in _COMPARED.values()]
        rows.append(_line((one.label, one.workload.name, *ratios)))
    return "\n".join(rows)


def notes(measurements: Sequence[Measurement]) -> list[str]:
    """What a reader must know before believing the figures."""
    found: list[str] = []
    for one in measurements:
        where = f"{one.label}, {one.workload.name}"
        said = {text: None for each in one.rounds for text in each.failures}
        found += [f"{where}: failed with: {text}" for text in list(said)[:3]]
        if cached := sum(each.num_cached_tokens for each in one.rounds):
            found.append(f"{where}: {cached} prompt tokens came from a prefix cache")
        per_chunk = [each.tokens_per_chunk for each in one.rounds if each.tokens_per_chunk is not None]
        if per_chunk and max(per_chunk) > 1.02:
            found.append(f"{where}: {max(per_chunk):.2f} tokens a chunk: an ITL here is the gap between chunks")
        num_answers = one.num_requests - one.num_failed
        num_tokens = sum(each.num_tokens for each in one.rounds)
        if num_answers and num_tokens < num_answers * one.workload.ask.max_tokens:
            found.append(
                f"{where}: answers of {num_tokens / num_answers:.1f} tokens, not {one.workload.ask.max_tokens}"
            )
        for each in one.rounds:
            if (long := each.long_prompts) is not None:
                found.append(
                    f"{where}: {long.num_requests} long prompts, TTFT p50/p95/p99 {_ms(long.ttft)} ms, "
                    f"{long.num_failed} failed"
                )
        if (one.num_cores("client_s") or 0.0) > _LIGHT_CORES:
            found.append(f"{where}: the load generator used more than a quarter of a core")
    if loud := [f"{one.label}, {one.workload.name}" for one in measurements if not one.is_quiet]:
        found.append(f"NOT QUIET: something else used a tenth of a core or more during {'; '.join(loud)}")
    return found


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ms(of: Percentiles | None) -> str:
    return "-" if of is None else f"{of.p50 * 1e3:.0f} / {of.p95 * 1e3:.0f} / {of.p99 * 1e3:.0f}"


def _ratio(one: float | None, base: float | None) -> float | None:
    return one / base if one is not None and base else None


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
