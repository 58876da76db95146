"""How a token is chosen, as plain data and a counter-based draw. Imports no torch.

Sampling is a pure function `(logits, sampling, seed, choice, position) -> token`: whichever worker,
attempt or batch computes it, the same position of the same choice draws the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_MASK = (1 << 64) - 1
_MAX_COUNT = (1 << 31) - 1
_MAX_TOKEN_ID = (1 << 32) - 1
MAX_LOGPROBS = 20
GREEDY_TEMPERATURE = 1e-5  # below it a draw is an argmax, but the logits it divides may overflow


class InvalidSampling(ValueError):
    """A sampling parameter is out of range; the message says which one and what is allowed."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks of the sampler. Applied in this order: logit bias, penalties,
    temperature, top-k, top-p, min-p, draw (the order of transformers' warpers).
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 (and below GREEDY_TEMPERATURE): greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    seed: int = 0
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: the chosen token's and the n likeliest
    n: int = 1

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self) -> None:
        """Raise `InvalidSampling` for the first value that can't be served."""

        def check(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise InvalidSampling(f"{name} must be {allowed}, not {getattr(self, name)}")

        check(1 <= self.max_tokens <= _MAX_COUNT, "max_tokens", "between 1 and 2^31 - 1")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        check(0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100")
        check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        check(0 <= self.top_k <= _MAX_COUNT, "top_k", "between 0 (off) and 2^31 - 1")
        check(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        check(0 <= self.seed <= _MASK, "seed", "between 0 and 2^64 - 1")
        check(0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "between 0.01 and 100")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        check(self.n == 1, "n", "1 (more choices are not built yet)")
        if self.logprobs is not None:
            check(0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"between 0 and {MAX_LOGPROBS}")
        if any(not -100.0 <= bias <= 100.0 for bias in self.logit_bias.values()):
            raise InvalidSampling("logit_bias values must be between -100 and 100")
        if any(not 0 <= token_id <= _MAX_TOKEN_ID for token_id in (*self.logit_bias, *self.stop_token_ids)):
            raise InvalidSampling("logit_bias and stop_token_ids must name token ids: whole numbers from 0 on")


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments.

    `position` is the place of the drawn token in its sequence, counted from the start of the prompt.
    Three rounds of the SplitMix64 finalizer (Steele, Lea, Flood, 2014), one for each argument.
    """
    state = 0
    for value in (seed, choice, position):
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)
