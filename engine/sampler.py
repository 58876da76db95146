"""Logits to tokens. Works on the rows that are asked for and never sorts the whole vocabulary.

The chain is transformers': penalties, temperature, top-k, top-p, min-p; then one draw by inverse
CDF in the order of token ids, from a counter-based number (engine/sampling.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows

import torch

from engine.output_stream import SampledToken
from engine.sampling import SamplingParams, uniform
from engine.sequence import Sequence

_NUM_CANDIDATES = 1024  # top-p nearly always ends among these; the exact path is the fallback
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
    filtered = [row for row, sequence in enumerate(sequences) if _is_filtered(sequence.sampling)]
    chosen: dict[int, int] = {}
    if filtered:
        sampling = [sequences[row].sampling for row in filtered]
        token_ids, kept, is_exact = _candidates(scaled[filtered], sampling)
        for place, row in enumerate(filtered):
            if is_exact[place]:
                ids = token_ids[place][kept[place]]
                chosen[row] = _invert(scaled[row, ids], ids, sequences[row])
            else:
                chosen[row] = _draw_exactly(scaled[row], sequences[row])
    for row, sequence in enumerate(sequences):
        if row not in chosen:
            chosen[row] = _invert(scaled[row], None, sequence)
    return [chosen[row] for row in range(len(sequences))]


def _is_filtered(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _candidates(scaled: torch.Tensor, sampling: list[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """The likeliest tokens of each row: ids `[num_rows, n]`, which of them the filters keep, and
    whether nothing outside could have been kept.
    """
    vocab_size = scaled.shape[-1]
    n = min(_NUM_CANDIDATES, vocab_size)
    token_ids = scaled.topk(n).indices.sort(-1).values
    values, order = scaled.gather(1, token_ids).sort(stable=True, dim=-1, descending=True)  # equal ones by token id
    token_ids = token_ids.gather(1, order)
    has_top_k = torch.tensor([0 < s.top_k < vocab_size for s in sampling])
    top_k = torch.tensor([min(s.top_k or n, n) for s in sampling])
    # top-k keeps what ties with the k-th value, as transformers does
    threshold = torch.where(has_top_k, values.gather(1, top_k[:, None] - 1)[:, 0], _NEVER)
    in_top_k = values >= threshold[:, None]
    log_sum = torch.where(has_top_k, torch.where(in_top_k, values, _NEVER).logsumexp(-1), scaled.logsumexp(-1))
    probs = torch.exp(values - log_sum[:, None])
    before = probs.cumsum(-1, dtype=torch.float64) - probs
    top_p = torch.tensor([s.top_p if s.top_p < 1.0 else 2.0 for s in sampling], dtype=torch.float64)[:, None]
    min_p = torch.tensor([s.min_p for s in sampling])[:, None]
    kept = in_top_k & (before < top_p) & (probs >= min_p * probs[:, :1])
    kept[:, 0] = True
    # nothing outside is likelier than the last candidate, so a cut above that one is final
    cut = torch.where(has_top_k, threshold, torch.where(kept, values, torch.inf).amin(-1))
    return token_ids, kept, ((cut > values[:, -1]) | (n == vocab_size)).tolist()


def _draw_exactly(scaled: torch.Tensor, sequence: Sequence) -> int:
    """The same filters over the whole sorted vocabulary: for the rare row that needs it."""
    sampling = sequence.sampling
    values, token_ids = scaled.sort(stable=True, descending=True)
    kept = torch.ones_like(values, dtype=torch.bool)
    if 0 < sampling.top_k < len(values):
        kept &= values >= values[sampling.top_k - 1]
    probs = torch.where(kept, values, _NEVER).softmax(-1)
    if sampling.top_p < 1.0:
        kept &= probs.cumsum(-1, dtype=torch.float64) - probs < sampling.top_p
    kept &= probs >= sampling.min_p * probs[0]
    kept[0] = True
    ids = token_ids[kept]
    return _invert(scaled[ids], ids, sequence)


def _invert(values: torch.Tensor, token_ids: torch.Tensor | None, sequence: Sequence) -> int:
    """Inverse CDF over `values` (log weights) in the order of token ids."""
    if token_ids is not None:
        token_ids, order = token_ids.sort()
        values = values[order]
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
