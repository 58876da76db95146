"""What a reader is shown: rows, ratios, and what puts the figures in doubt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks import compare
from benchmarks.report import Measurement, notes, ratio_table, row, table
from benchmarks.round import CpuTime
from tests.benchmarks.makers import make_reply, make_round, make_workload


def make_measurement(label: str = "small", name: str = "1", duration_s: float = 2.0, gap_s: float = 0.1) -> Measurement:
    reply = make_reply(0.5, 0.5 + gap_s, 0.5 + 2 * gap_s, 0.5 + 3 * gap_s, num_prompt_tokens=20)
    rounds = tuple(make_round(reply, reply, duration_s=seconds * duration_s) for seconds in (1.0, 0.5, 2.0))
    return Measurement(label, make_workload(name), rounds)


def test_a_row_has_the_median_of_its_rounds() -> None:
    assert row(make_measurement()) == (
        "| small | 1 | 4.0 (2.0-8.0) | 500 / 500 / 500 | 100 / 100 / 100 | 100 / 100 / 100 "
        "| 0 of 6 | 0.01/0.75/0.00/0.00 |"
    )


def test_a_table_is_as_wide_in_every_line() -> None:
    lines = table([make_measurement(), make_measurement("large")]).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1


def test_what_is_not_known_is_a_dash() -> None:
    failed = make_round(make_reply(error="gone"))
    shown = row(Measurement("small", make_workload(), (replace(failed, cpu=CpuTime(client_s=0.1)),)))
    assert shown == "| small | 1 | 0.0 (0.0-0.0) | - | - | - | 1 of 1 | 0.10/-/-/- |"


def test_ratios_are_over_the_same_workload_of_the_base() -> None:
    fast, slow = make_measurement("ours", duration_s=1.0, gap_s=0.05), make_measurement("vllm")
    ratios = ratio_table([fast, make_measurement("ours", name="8"), slow], "vllm")
    assert ratios is not None
    assert ratios.splitlines()[2:] == ["| ours | 1 | 2.00x | 1.00x | 0.50x | 0.50x | 0.50x | 0.50x |"]


def test_there_are_no_ratios_without_the_base() -> None:
    assert ratio_table([make_measurement()], "vllm") is None
    assert ratio_table([make_measurement("vllm")], "vllm") is None


def test_a_clean_measurement_has_no_notes() -> None:
    assert notes([make_measurement()]) == []


def test_a_reader_is_told_what_puts_figures_in_doubt() -> None:
    reply = make_reply(0.5, 1.0, num_tokens=3, num_cached_tokens=16)
    figures = make_round(reply, make_reply(error="HTTP 503: busy"))
    busy = replace(figures, cpu=CpuTime(client_s=0.5, server_s=1.0, others_s=0.3, steal_s=0.0))
    told = notes([Measurement("small", make_workload(), (busy,))])
    assert told == [
        "small, 1: failed with: HTTP 503: busy",
        "small, 1: 16 prompt tokens came from a prefix cache",
        "small, 1: 1.50 tokens a chunk: an ITL here is the gap between chunks",
        "small, 1: answers of 3.0 tokens, not 4",
        "small, 1: the load generator used more than a quarter of a core",
        "NOT QUIET: something else used a tenth of a core or more during small, 1",
    ]


def test_the_newest_section_comes_first_and_older_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    for number in (1, 2, 3):
        compare.add_section(path, f"## Run {number}\n\ntable {number}\n")
    head, *sections = path.read_text().split("\n## ")
    assert head.startswith("# Results")
    assert [section.split() for section in sections] == [["Run", str(n), "table", str(n)] for n in (3, 2, 1)]


def test_drawn_tokens_are_measured_for_the_plain_numbers_of_streams_alone() -> None:
    found = compare.sampled([make_workload("8"), make_workload("4 of 1300 tokens")])
    assert [(one.name, one.ask.temperature, one.ask.top_p) for one in found] == [("8, temperature 0.8", 0.8, 0.95)]
