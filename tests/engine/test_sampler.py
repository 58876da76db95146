"""The sampler against transformers' processors and warpers, followed by one draw done naively in float64."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine.output_stream import SampledToken
from engine.sampler import Sampler
from engine.sampling import SamplingParams
from engine.sequence import Sequence
from tests.engine.makers import make_sequence
from tests.parity import acceptable_tokens, process

EOS_IDS = frozenset({3, 11})
VOCAB_SIZE = 49_152  # of the bundled model


def make_logits(vocab_size: int = 300, scale: float = 3.0, seed: int = 0, num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    return Sampler(EOS_IDS).sample(logits, sequences)


def sample_one(logits: torch.Tensor, sequence: Sequence) -> int:
    return sample(logits, [sequence])[0].token_id


def reference_tokens(logits: torch.Tensor, sequence: Sequence) -> set[int]:
    return acceptable_tokens(
        logits[0], sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens, EOS_IDS, sequence.choice
    )


def make(sampling: SamplingParams, output_ids: tuple[int, ...] = (), **changes: Any) -> Sequence:
    sequence = make_sequence(6, sampling=sampling, **changes)
    sequence.token_ids += output_ids
    return sequence


EACH = {
    "greedy": {"temperature": 0.0},
    "barely warm": {"temperature": 2e-5},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 100.0},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k of all": {"top_k": 300},
    "top_k of more than all": {"top_k": 100_000},
    "top_p": {"top_p": 0.8},
    "tiny top_p": {"top_p": 1e-9},
    "min_p": {"min_p": 0.1},
    "min_p of one": {"min_p": 1.0},
    "repetition": {"repetition_penalty": 1.7},
    "reward of repetition": {"repetition_penalty": 0.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "reward of frequency": {"frequency_penalty": -2.0},
    "bias": {"logit_bias": {5: 4.0, 250: -100.0, 3: 2.0}},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": (7, 250)},
    "min_tokens are there": {"min_tokens": 4, "stop_token_ids": (7, 250)},
}


@pytest.mark.parametrize("change", EACH.values(), ids=EACH.keys())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_parameter_alone_equals_transformers(change: dict[str, Any], temperature: float) -> None:
    for seed in range(20):
        sampling = replace(SamplingParams(temperature=temperature, seed=seed, max_tokens=20), **change)
        sequence = make(sampling, (7, 9, 7, 3))
        logits = make_logits(seed=seed)
        assert sample_one(logits, sequence) in reference_tokens(logits, sequence)


any_sampling = st.builds(
    SamplingParams,
    max_tokens=st.just(20),
    min_tokens=st.integers(0, 8),
    temperature=st.sampled_from((0.0, 0.3, 0.8, 1.0, 1.9)),
    top_p=st.sampled_from((0.05, 0.5, 0.9, 0.99, 1.0)),
    top_k=st.sampled_from((0, 1, 7, 40, 1023, 1024, 1500)),
    min_p=st.sampled_from((0.0, 0.02, 0.3)),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from((1.0, 0.5, 1.3)),
    presence_penalty=st.sampled_from((0.0, -1.0, 1.0)),
    frequency_penalty=st.sampled_from((0.0, 0.4)),
    logit_bias=st.dictionaries(st.integers(0, 299), st.floats(-10, 10), max_size=4),
    stop_token_ids=st.lists(st.integers(0, 299), max_size=2).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(
    any_sampling,
    st.lists(st.integers(0, 299), max_size=10).map(tuple),
    st.sampled_from((300, 1024, 1025, 3000)),
    st.sampled_from((0.1, 1.0, 4.0)),
    st.integers(0, 2**32),
)
def test_every_combination_equals_transformers(
    sampling: SamplingParams, output_ids: tuple[int, ...], vocab_size: int, scale: float, seed: int
) -> None:
    logits = make_logits(vocab_size, scale, seed)
    sequence = make(sampling, output_ids)
    assert sample_one(logits, sequence) in reference_tokens(logits, sequence)


@pytest.mark.parametrize(
    "change",
    [
        {"top_p": 0.999},
        {"top_k": 20_000},
        {"top_k": 2000, "top_p": 0.5},  # renormalised over 2000, of which the first 1024 are a part
        {"top_k": 1024, "top_p": 0.9},
        {"min_p": 0.5},
        {"top_k": 30_000, "top_p": 0.99, "min_p": 0.3},
    ],
    ids=str,
)
def test_a_flat_distribution_over_the_whole_vocabulary_is_filtered_exactly(change: dict[str, Any]) -> None:
    for seed in range(6):
        logits = make_logits(VOCAB_SIZE, 0.2, seed)
        sequence = make(replace(SamplingParams(seed=seed), **change))
        assert sample_one(logits, sequence) in reference_tokens(logits, sequence)


class LargestSort(TorchDispatchMode):
    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "sort" in func.__name__:
            self.num_elements = max(self.num_elements, args[0].numel())
        return func(*args, **(kwargs or {}))


def test_the_whole_vocabulary_is_not_sorted() -> None:
    """Logits as peaked as a language model's; a sort of 32 x 49k costs more than a step's matrix products."""
    for change in ({"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.05}, {"top_k": 1000, "top_p": 0.999}):
        sequence = make(replace(SamplingParams(), **change))
        with LargestSort() as largest:
            sample_one(make_logits(VOCAB_SIZE, 5.0), sequence)
        assert 0 < largest.num_elements < VOCAB_SIZE / 4


@pytest.mark.parametrize("vocab_size", [50, VOCAB_SIZE])
def test_of_equal_logits_the_smaller_token_id_comes_first(vocab_size: int) -> None:
    """Greedy takes it, top-p keeps it; top-k keeps all that tie with the last, as transformers does."""
    logits = torch.zeros(1, vocab_size)
    assert sample_one(logits, make(SamplingParams(temperature=0.0))) == 0
    for seed in range(30):
        top_p = make(SamplingParams(top_p=9.5 / vocab_size, seed=seed))
        assert sample_one(logits, top_p) < 10
    logits[0, 7:13] = 5.0
    drawn = {sample_one(logits, make(SamplingParams(top_k=2, seed=seed))) for seed in range(60)}
    assert drawn == {7, 8, 9, 10, 11, 12}


def test_ties_at_the_end_of_the_nucleus_are_cut_by_token_id_too() -> None:
    """A long run of equal logits, a few of which top-p keeps."""
    logits = torch.full((1, 5000), -20.0)
    logits[0, 4000:] = 5.0  # 1000 of these
    logits[0, 1000:3000] = 4.0
    weight = 1000 + 2000 * torch.exp(torch.tensor(-1.0)).item()
    top_p = (1000 + 5.5 * torch.exp(torch.tensor(-1.0)).item()) / weight
    for seed in range(400):
        token_id = sample_one(logits, make(SamplingParams(top_p=top_p, seed=seed)))
        assert token_id >= 4000 or 1000 <= token_id <= 1005


def test_a_mixed_batch_is_independent_of_its_neighbours() -> None:
    samplings = [replace(SamplingParams(seed=9, max_tokens=20), **change) for change in EACH.values()]
    samplings += [replace(sampling, logprobs=3) for sampling in samplings[:4]]
    sequences = [make(sampling, (7, 9, 7)) for sampling in samplings]
    logits = make_logits(2000, num_rows=len(sequences))
    together = sample(logits, sequences)
    alone = [sample(logits[row : row + 1], [sequence])[0] for row, sequence in enumerate(sequences)]
    assert together == alone
    order = list(range(len(sequences)))[::-1]
    assert sample(logits[order], [sequences[row] for row in order]) == together[::-1]


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 3), st.integers(0, 50))
def test_the_draw_depends_on_seed_choice_and_position_only(seed: int, choice: int, num_output: int) -> None:
    logits = make_logits(50)
    sampling = SamplingParams(seed=seed, max_tokens=99)
    one = make(sampling, (1,) * num_output, choice=choice)
    same = make(sampling, (2,) * num_output, choice=choice, priority=4, num_emitted_tokens=num_output)
    resumed = make_sequence(6 + num_output, sampling=sampling, choice=choice)
    assert sample_one(logits, one) == sample_one(logits, same) == sample_one(logits, resumed)
    assert sample_one(logits, one) in reference_tokens(logits, one)


@pytest.mark.parametrize("change", [{}, {"temperature": 1.5}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.1}], ids=str)
def test_tokens_come_as_often_as_they_are_likely(change: dict[str, Any]) -> None:
    num_draws = 4000
    sampling = replace(SamplingParams(max_tokens=num_draws), **change)
    logits = make_logits(12, scale=1.0, seed=2)
    sequences = [make(replace(sampling, seed=draw % 40), (0,) * (draw // 40)) for draw in range(num_draws)]
    counts = Counter(token.token_id for token in sample(logits.expand(num_draws, -1), sequences))
    expected = process(logits[0], sampling, [0], 1).double().softmax(-1) * num_draws
    kept = [token_id for token_id in range(12) if expected[token_id] > 0]
    assert set(counts) <= set(kept)
    chi_square = sum(
        (counts[token_id] - float(expected[token_id])) ** 2 / float(expected[token_id]) for token_id in kept
    )
    # mean is the degrees of freedom, deviation sqrt(2 of them); seeds are fixed, and so is this result
    freedom = len(kept) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("number", [0, 1, 20])
def test_logprobs_are_of_the_models_own_logits(number: int) -> None:
    logits = make_logits(seed=3)
    sampling = SamplingParams(logprobs=number, temperature=0.5, top_k=3, logit_bias={4: 50.0})
    (token,) = sample(logits, [make(sampling)])
    expected = logits[0].double().log_softmax(-1)
    assert token.token_id == 4
    assert token.logprob == pytest.approx(float(expected[4]), abs=1e-5)
    values, ids = expected.topk(number)
    assert [token_id for token_id, _ in token.top_logprobs] == ids.tolist()
    assert [value for _, value in token.top_logprobs] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_come_only_where_they_are_asked_for() -> None:
    (token,) = sample(make_logits(), [make(SamplingParams())])
    assert (token.logprob, token.top_logprobs) == (None, ())


def test_changes_neither_the_logits_nor_the_sequence() -> None:
    logits = make_logits()
    before = logits.clone()
    sampling = SamplingParams(max_tokens=9, min_tokens=9, logit_bias={1: 2.0}, repetition_penalty=1.2, logprobs=1)
    sequence = make(sampling, (4, 5))
    sample(logits, [sequence])
    assert torch.equal(logits, before)
    assert sequence.token_ids[6:] == [4, 5]


def test_ends_outside_the_vocabulary_are_no_trouble() -> None:
    """A configuration may name end tokens that this model has no row for."""
    sampling = SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=(299, 300, 10**9))
    assert Sampler(frozenset({3, 4_000_000})).sample(make_logits(), [make(sampling)])[0].token_id < 299


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_as_their_float32_values(dtype: torch.dtype) -> None:
    logits = make_logits(2000).to(dtype)
    for change in EACH.values():
        sequence = make(replace(SamplingParams(max_tokens=20), **change))
        assert sample_one(logits, sequence) == sample_one(logits.float(), sequence)
