"""Logits to tokens. Works on the rows that are asked for and never sorts the whole vocabulary.

The chain is transformers': penalties, temperature, top-k, top-p, min-p; then one draw by inverse
CDF in the order of token ids, from a counter-based number (engine/sampling.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Rows

import torch

from engine.output_stream import SampledToken
from engine.sampling import SamplingParams, uniform
from engine.sequence import Sequence

_MARGIN = 1e-3  # of a log weight: more than rounding can move one that is only compared to leave tokens out
_NEVER = float("-inf")


class Sampler:
    """Chooses tokens for any mix of sampling parameters in one batch."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: torch.Tensor, sequences: Rows[Sequence]) -> list[SampledToken]:
        """`logits` is `[num_rows, vocab_size]`, one row for each sequence. Reads the sequences only."""
        raw = logits
        if any(_changes_logits(sequence) for sequence in sequences):
            logits = logits.float().clone()
            for row, sequence in enumerate(sequences):
                self._adjust(logits[row], sequence)
        token_ids = logits.argmax(-1).tolist()
        drawn = [row for row, sequence in enumerate(sequences) if not sequence.sampling.is_greedy]
        if drawn:
            for row, token_id in zip(
                drawn, _draw(logits[drawn].float(), [sequences[row] for row in drawn]), strict=True
            ):
                token_ids[row] = token_id
        return [
            SampledToken(token_id)
            if sequence.sampling.logprobs is None
            else _with_logprobs(raw[row], token_id, sequence.sampling)
            for row, (token_id, sequence) in enumerate(zip(token_ids, sequences, strict=True))
        ]

    def _adjust(self, logits: torch.Tensor, sequence: Sequence) -> None:
        """Bias, minimum length and penalties, in place on one row `[vocab_size]`."""
        sampling = sequence.sampling
        for token_id, bias in sampling.logit_bias.items():
            logits[token_id] += bias
        if sequence.num_output_tokens < sampling.min_tokens:
            ends = {*self._eos_token_ids, *sampling.stop_token_ids}
            logits[sorted(token_id for token_id in ends if token_id < len(logits))] = _NEVER
        if sampling.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(sequence.token_ids)))
            score = logits[seen]
            penalty = sampling.repetition_penalty
            logits[seen] = torch.where(score < 0, score * penalty, score / penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            counts = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
            if counts:
                seen = torch.tensor(list(counts))
                number = torch.tensor(list(counts.values()), dtype=torch.float32)
                logits[seen] -= sampling.presence_penalty + sampling.frequency_penalty * number


def _changes_logits(sequence: Sequence) -> bool:
    sampling = sequence.sampling
    return bool(sampling.logit_bias) or sampling.has_penalties or sequence.num_output_tokens < sampling.min_tokens


def _draw(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """One token for each row of float32 `logits` `[num_rows, vocab_size]`, none of them greedy."""
    scaled = logits / torch.tensor([sequence.sampling.temperature for sequence in sequences])[:, None]
    return [
        _invert(row, _kept(row, sequence.sampling), sequence) for row, sequence in zip(scaled, sequences, strict=True)
    ]


def _kept(scaled: torch.Tensor, sampling: SamplingParams) -> torch.Tensor | None:
    """Ids, ascending, of the tokens that top-k, then top-p, then min-p keep; `None` for all of them.

    `scaled` is one row, `[vocab_size]`. Tokens that can't be kept are left out before anything is sorted.
    """
    has_top_k = 0 < sampling.top_k < len(scaled)
    if not has_top_k and sampling.top_p == 1.0 and not sampling.min_p:
        return None
    kept = _Kept(scaled)
    if has_top_k:  # with what ties with the k-th value, as transformers does
        kept.keep(kept.values >= scaled.topk(sampling.top_k, sorted=False).values.min())
    highest = kept.values.max()
    if sampling.top_p < 1.0:
        log_sum = kept.values.logsumexp(-1)
        # those below the floor weigh less than 1 - top_p, all together: the nucleus ends before them
        kept.keep(kept.values >= log_sum + math.log((1.0 - sampling.top_p) / len(scaled)) - _MARGIN)
        probs, order = torch.exp(kept.values - log_sum).double().sort(stable=True, descending=True)
        num_kept = max(1, int((probs.cumsum(-1) - probs < sampling.top_p).sum()))
        kept.keep(order[:num_kept].sort().values)  # of equal ones the smaller token id comes first
    if sampling.min_p:
        kept.keep(torch.exp(kept.values - highest) >= sampling.min_p)
    return kept.token_ids


class _Kept:
    """What is left of one row: log weights, and the token ids that they belong to."""

    def __init__(self, scaled: torch.Tensor) -> None:
        self.values = scaled
        self.token_ids: torch.Tensor | None = None  # `None`: all of them

    def keep(self, places: torch.Tensor) -> None:
        """`places` are a mask, or ascending numbers."""
        if places.dtype == torch.bool:
            places = places.nonzero()[:, 0]
        self.values = self.values[places]
        self.token_ids = places if self.token_ids is None else self.token_ids[places]


def _invert(scaled: torch.Tensor, token_ids: torch.Tensor | None, sequence: Sequence) -> int:
    """Inverse CDF over `scaled` `[vocab_size]` (log weights) at `token_ids`, in the order of token ids."""
    values = scaled if token_ids is None else scaled[token_ids]
    cumulative = torch.exp((values - values.max()).double()).cumsum(-1)
    number = uniform(sequence.sampling.seed, sequence.choice, sequence.num_tokens)
    place = int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
    place = min(place, len(values) - 1)
    return place if token_ids is None else int(token_ids[place])


def _with_logprobs(logits: torch.Tensor, token_id: int, sampling: SamplingParams) -> SampledToken:
    """The model's own log probabilities, before temperature and filters."""
    logprobs = logits.float().log_softmax(-1)
    top: tuple[tuple[int, float], ...] = ()
    if sampling.logprobs:
        values, ids = logprobs.topk(sampling.logprobs)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token_id, float(logprobs[token_id]), top)
