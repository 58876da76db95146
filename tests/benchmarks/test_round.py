"""The figures of a round are what their names say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.round import Percentiles, median_percentiles, percentile, percentiles
from tests.benchmarks.makers import make_reply, make_round

numbers = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(numbers, st.sampled_from([0, 1, 50, 95, 99, 100]))
def test_a_percentile_is_that_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)))


def test_percentiles_take_values_in_any_order() -> None:
    found = percentiles([3.0, 1.0, 2.0])
    assert found is not None
    assert (found.p50, found.p95, found.p99) == pytest.approx((2.0, 2.9, 2.98))


def test_nothing_has_no_percentiles() -> None:
    assert percentiles([]) is None


def test_the_speed_of_a_round_is_of_all_its_streams() -> None:
    assert make_round(make_reply(1.0, 2.0), make_reply(1.0, 3.0), duration_s=4.0).tokens_per_s == 1.0


def test_a_failed_reply_is_counted_and_is_in_no_figure() -> None:
    failed = [make_reply(9.0, error="HTTP 503: busy"), make_reply(error="HTTP 503: busy"), make_reply(error="gone")]
    figures = make_round(make_reply(1.0, 2.0), *failed)
    assert (figures.num_requests, figures.num_failed, figures.num_tokens) == (4, 3, 2)
    assert figures.failures == {"HTTP 503: busy": 2, "gone": 1}
    assert figures.ttft == Percentiles(1.0, 1.0, 1.0)


def test_a_round_where_all_failed_has_no_figures() -> None:
    figures = make_round(make_reply(error="gone"))
    assert figures.tokens_per_s == 0
    assert {figures.ttft, figures.tpot, figures.itl, figures.tokens_per_chunk, figures.prompt_tokens} == {None}


def test_itl_is_over_the_gaps_of_all_replies_and_tpot_over_the_replies() -> None:
    figures = make_round(make_reply(1.0, 1.1, 1.2, 1.9), make_reply(1.0, 2.0))
    assert figures.itl is not None and figures.tpot is not None
    assert figures.itl.p50 == pytest.approx(0.4)  # of 0.1, 0.1, 0.7, 1.0
    assert figures.tpot.p50 == pytest.approx(0.65)  # of 0.3 and 1.0


def test_chunks_with_several_tokens_are_seen() -> None:
    assert make_round(make_reply(1.0, 2.0, num_tokens=6)).tokens_per_chunk == 3


def test_the_median_of_rounds_skips_those_without_a_figure() -> None:
    several = [Percentiles(1, 5, 9), None, Percentiles(3, 4, 8), Percentiles(2, 6, 7)]
    assert median_percentiles(several) == Percentiles(2, 5, 8)
    assert median_percentiles([None]) is None
