"""The figures of a round: percentiles of its replies, and the median of several rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from benchmarks.reply import Reply


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of durations, in seconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU seconds during a round. `server_s` is None where the server's process isn't known."""

    client_s: float
    server_s: float | None = None
    others_s: float | None = None  # the whole machine, less these two
    steal_s: float | None = None  # wanted by this machine, given to another


@dataclass(frozen=True, slots=True)
class LongFigures:
    """Of the long prompts that arrived beside the streams; those still on their way at the end are in none."""

    num_requests: int
    num_failed: int
    ttft: Percentiles | None


@dataclass(frozen=True, slots=True)
class Round:
    """One round. What has no value (no reply was whole, or all had one token) is None."""

    num_requests: int
    num_failed: int
    failures: dict[str, int]  # what was said, how often
    duration_s: float
    num_tokens: int  # of whole replies
    tokens_per_s: float
    tokens_per_chunk: float | None
    prompt_tokens: float | None  # mean; None: the server doesn't tell
    num_cached_tokens: int
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    cpu: CpuTime
    long_prompts: LongFigures | None = None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, at least one; linear between two neighbours, as numpy has it."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def percentiles(values: Sequence[float]) -> Percentiles | None:
    if not values:
        return None
    ordered = sorted(values)
    return Percentiles(percentile(ordered, 50), percentile(ordered, 95), percentile(ordered, 99))


def summarize(replies: Sequence[Reply], duration_s: float, cpu: CpuTime) -> Round:
    """A round's figures. Failed replies are counted, and are in no figure."""
    whole = [reply for reply in replies if not reply.error]
    num_tokens = sum(reply.num_tokens for reply in whole)
    num_chunks = sum(reply.num_chunks for reply in whole)
    prompts = [reply.num_prompt_tokens for reply in whole if reply.num_prompt_tokens]
    return Round(
        num_requests=len(replies),
        num_failed=len(replies) - len(whole),
        failures=dict(Counter(reply.error for reply in replies if reply.error)),
        duration_s=duration_s,
        num_tokens=num_tokens,
        tokens_per_s=num_tokens / duration_s,
        tokens_per_chunk=num_tokens / num_chunks if num_chunks else None,
        prompt_tokens=fmean(prompts) if prompts else None,
        num_cached_tokens=sum(reply.num_cached_tokens for reply in whole),
        ttft=percentiles([reply.ttft_s for reply in whole]),
        tpot=percentiles([reply.tpot_s for reply in whole if reply.tpot_s is not None]),
        itl=percentiles([gap for reply in whole for gap in reply.itl_s]),
        cpu=cpu,
    )


def summarize_long(replies: Sequence[Reply]) -> LongFigures:
    whole = [reply for reply in replies if not reply.error]
    return LongFigures(len(replies), len(replies) - len(whole), percentiles([reply.ttft_s for reply in whole]))


def median_percentiles(several: Sequence[Percentiles | None]) -> Percentiles | None:
    """Each percentile's median over the rounds that have it."""
    known = [one for one in several if one is not None]
    if not known:
        return None
    return Percentiles(*(median(getattr(one, name) for one in known) for name in ("p50", "p95", "p99")))
