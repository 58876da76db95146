"""What "equal to transformers" means, token by token, and its one excuse (docs/architecture.md, "equal output").

The reference computes the prompt and our own output in one pass (teacher-forced), so that each token is judged by
itself: greedy, it must have the highest logit, or be within `MAX_LOGIT_GAP` of it; seeded, it must be what
transformers' warpers and then our draw give, or be that for a draw or a filter moved by `MAX_DRAW_GAP`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampling import SamplingParams, uniform

MAX_LOGIT_GAP = 1e-4
MAX_DRAW_GAP = 1e-5


@cache
def reference_model(folder: Path) -> Any:
    """transformers' own model of the folder, in float32 and with its own attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def reference_logits(model: Any, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
    """The logits that each output token was chosen from, `[num_output_tokens, vocab_size]`."""
    token_ids = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
    keep = torch.arange(len(prompt_ids) - 1, token_ids.shape[1])
    with torch.inference_mode():
        return model(input_ids=token_ids, use_cache=False, logits_to_keep=keep).logits[0].float()


def assert_same_greedy(model: Any, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
    """Each token is the likeliest, given the prompt and what came before it. Where it ends is not judged."""
    for place, (token_id, logits) in enumerate(
        zip(output_ids, reference_logits(model, prompt_ids, output_ids), strict=True)
    ):
        gap = float(logits.max() - logits[token_id])
        assert gap <= MAX_LOGIT_GAP, (
            f"token {place} is {token_id}, not {int(logits.argmax())}: its logit is {gap:.3g} lower"
        )


def assert_same_seeded(
    model: Any,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    sampling: SamplingParams,
    eos_token_ids: frozenset[int] = frozenset(),
    choice: int = 0,
) -> None:
    """Each token is the one that the filters and the draw give, given the prompt and what came before it."""
    all_logits = reference_logits(model, prompt_ids, output_ids)
    for place, (token_id, logits) in enumerate(zip(output_ids, all_logits, strict=True)):
        before = [*prompt_ids, *output_ids[:place]]
        expected = draw(
            process(logits, sampling, before, len(prompt_ids), eos_token_ids), sampling, choice, len(before)
        )
        if token_id != expected:
            allowed = acceptable_tokens(logits, sampling, before, len(prompt_ids), eos_token_ids, choice)
            assert token_id in allowed, f"token {place} is {token_id}, not {expected}, nor of {sorted(allowed)}"


def draw(scores: torch.Tensor, sampling: SamplingParams, choice: int, position: int, moved: float = 0.0) -> int:
    """The token at `position`, by inverse CDF over processed `scores` `[vocab_size]`, naively in float64."""
    if sampling.is_greedy:
        return int(scores.argmax())
    cumulative = scores.double().softmax(-1).cumsum(-1)
    number = max(0.0, uniform(sampling.seed, choice, position) + moved)
    place = torch.searchsorted(cumulative, number * cumulative[-1], right=True)
    return min(int(place), len(scores) - 1)


def acceptable_tokens(
    logits: torch.Tensor,
    sampling: SamplingParams,
    before: Sequence[int],
    num_prompt_tokens: int,
    eos_token_ids: frozenset[int] = frozenset(),
    choice: int = 0,
) -> set[int]:
    """What may be chosen from `logits` `[vocab_size]` after the tokens `before`: nearly always one token.

    More where the number drawn, or a filter, is within `MAX_DRAW_GAP` of where the choice changes.
    """
    return {
        draw(process(logits, variant, before, num_prompt_tokens, eos_token_ids), sampling, choice, len(before), moved)
        for variant in _neighbours(sampling)
        for moved in (0.0, -MAX_DRAW_GAP, MAX_DRAW_GAP)
    }


def process(
    logits: torch.Tensor,
    sampling: SamplingParams,
    before: Sequence[int],
    num_prompt_tokens: int,
    eos_token_ids: frozenset[int] = frozenset(),
) -> torch.Tensor:
    """transformers' processors and warpers, in the order of its `generate`: `[vocab_size]` float32."""
    input_ids = torch.tensor([list(before)])
    scores: torch.Tensor = LogitsProcessorList(_processors(sampling, num_prompt_tokens, eos_token_ids))(
        input_ids, logits[None].float().clone()
    )
    return scores[0]


class _PresenceAndFrequency(LogitsProcessor):
    """The two penalties of OpenAI's interface, on the output alone: transformers has none."""

    def __init__(self, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        self._sampling = sampling
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token_id in input_ids[0, self._num_prompt_tokens :].tolist():
            scores[0, token_id] -= self._sampling.frequency_penalty
        for token_id in set(input_ids[0, self._num_prompt_tokens :].tolist()):
            scores[0, token_id] -= self._sampling.presence_penalty
        return scores


def _processors(
    sampling: SamplingParams, num_prompt_tokens: int, eos_token_ids: frozenset[int]
) -> Iterator[LogitsProcessor]:
    if sampling.logit_bias:
        yield SequenceBiasLogitsProcessor({(token_id,): float(bias) for token_id, bias in sampling.logit_bias.items()})
    if sampling.repetition_penalty != 1.0:
        yield RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    ends = sorted({*eos_token_ids, *sampling.stop_token_ids})
    if sampling.min_tokens and ends:
        yield MinNewTokensLengthLogitsProcessor(num_prompt_tokens, sampling.min_tokens, ends)
    if sampling.presence_penalty or sampling.frequency_penalty:
        yield _PresenceAndFrequency(sampling, num_prompt_tokens)
    if sampling.is_greedy:
        return
    yield TemperatureLogitsWarper(float(sampling.temperature))
    if sampling.top_k:
        yield TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1.0:
        yield TopPLogitsWarper(sampling.top_p)
    if sampling.min_p > 0.0:
        yield MinPLogitsWarper(sampling.min_p)


def _neighbours(sampling: SamplingParams) -> Iterator[SamplingParams]:
    """The same, and with each filter a hair tighter or looser."""
    yield sampling
    if sampling.is_greedy:
        return
    moves = (0.0, -MAX_DRAW_GAP, MAX_DRAW_GAP)
    top_ps = [min(1.0, sampling.top_p + move) for move in moves] if sampling.top_p < 1.0 else [1.0]
    min_ps = [min(1.0, sampling.min_p * (1.0 + move)) for move in moves] if sampling.min_p else [0.0]
    for top_p, min_p in itertools.product(top_ps, min_ps):
        yield replace(sampling, top_p=max(top_p, 1e-9), min_p=min_p)
