"""SamplingParams says what it can't serve; `uniform` is a fixed function that looks like chance."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import InvalidSampling, SamplingParams, uniform

any_64_bits = st.integers(0, 2**64 - 1)


def test_defaults_are_valid_and_switch_everything_off() -> None:
    sampling = SamplingParams()
    sampling.validate()
    assert not sampling.has_penalties
    assert not sampling.is_greedy


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0.0, True), (1e-6, True), (1e-4, False), (1.0, False)])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy == is_greedy


@pytest.mark.parametrize(
    "change", [{"repetition_penalty": 1.1}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.5}]
)
def test_each_penalty_counts_as_one(change: dict[str, float]) -> None:
    assert replace(SamplingParams(), **change).has_penalties


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 101.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("logprobs", -1),
        ("logprobs", 21),
        ("n", 0),
        ("n", 2),
    ],
)
def test_refuses_by_the_name_of_the_field_and_says_what_is_allowed(field: str, value: float) -> None:
    with pytest.raises(InvalidSampling, match=rf"^{field} must be .+, not {value}$"):
        replace(SamplingParams(), **{field: value}).validate()


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(logit_bias={5: 100.5}), "logit_bias values"),
        (SamplingParams(logit_bias={5: math.nan}), "logit_bias values"),
        (SamplingParams(logit_bias={-1: 1.0}), "token ids"),
        (SamplingParams(stop_token_ids=(2**32,)), "token ids"),
    ],
)
def test_refuses_a_bias_or_a_stop_token_that_can_be_none(sampling: SamplingParams, message: str) -> None:
    with pytest.raises(InvalidSampling, match=message):
        sampling.validate()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=1, min_tokens=1, temperature=0.0, top_p=1e-9, seed=2**64 - 1, logprobs=0),
        SamplingParams(max_tokens=2**31 - 1, temperature=100.0, top_k=2**31 - 1, min_p=1.0, logprobs=20),
        SamplingParams(presence_penalty=-2.0, frequency_penalty=2.0, logit_bias={0: -100.0, 2**32 - 1: 100.0}),
    ],
)
def test_accepts_both_ends_of_every_range(sampling: SamplingParams) -> None:
    sampling.validate()


@settings(deadline=None)
@given(any_64_bits, st.integers(0, 2**32), st.integers(0, 2**32))
def test_uniform_is_a_function_into_0_to_1(seed: int, choice: int, position: int) -> None:
    number = uniform(seed, choice, position)
    assert 0.0 <= number < 1.0
    assert number == uniform(seed, choice, position)


@settings(deadline=None)
@given(any_64_bits, st.integers(0, 1000), st.integers(0, 100_000))
def test_uniform_depends_on_each_argument(seed: int, choice: int, position: int) -> None:
    number = uniform(seed, choice, position)
    assert number != uniform(seed ^ 1, choice, position)
    assert number != uniform(seed, choice + 1, position)
    assert number != uniform(seed, choice, position + 1)


def chi_square(numbers: list[float], num_bins: int) -> float:
    counts = [0] * num_bins
    for number in numbers:
        counts[int(number * num_bins)] += 1
    expected = len(numbers) / num_bins
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_uniform_is_uniform_along_each_argument(varied: str) -> None:
    at = {"seed": 1, "choice": 0, "position": 75}
    numbers = [uniform(**(at | {varied: value})) for value in range(20_000)]
    # 99 degrees of freedom: mean 99, standard deviation 14. The function is fixed, and so is this result.
    assert chi_square(numbers, 100) < 99 + 4 * 14
    neighbours = itertools.pairwise(numbers)
    covariance = sum((a - 0.5) * (b - 0.5) for a, b in neighbours) / (len(numbers) - 1)
    assert abs(covariance * 12) < 4 / math.sqrt(len(numbers))


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ((0, 0, 0), 0.13870941014555427),
        ((1, 0, 0), 0.6935121390102292),
        ((0, 1, 0), 0.2691303195904541),
        ((0, 0, 1), 0.18436667429957676),
        ((42, 0, 75), 0.6792007570748619),
        ((2**64 - 1, 3, 8191), 0.6696996463481267),
    ],
)
def test_uniform_never_changes(arguments: tuple[int, int, int], number: float) -> None:
    """A worker of another release must draw the same: a change here breaks every resumed sequence."""
    assert uniform(*arguments) == number
