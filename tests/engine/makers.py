"""Makers of the engine's control state, a drive without a model, and what must hold at every moment."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from engine.batch import Batch
from engine.block_pool import FREE, BlockPool, Holder
from engine.output_stream import SampledToken
from engine.sampling import SamplingParams
from engine.scheduler import Completed, Scheduler, SchedulerLimits
from engine.sequence import Sequence

EOS = 0
TOKEN = 7  # what the drive "samples" unless told otherwise

_numbers = itertools.count()


def make_pool(num_blocks: int = 8, block_size: int = 4, poison: Callable[[list[int]], None] | None = None) -> BlockPool:
    return BlockPool(num_blocks, block_size, poison)


def make_scheduler(
    num_blocks: int = 8,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 1000,
) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens, max_model_len, frozenset({EOS}))
    return Scheduler(make_pool(num_blocks, block_size), limits)


def make_sequence(
    num_prompt_tokens: int = 5, max_tokens: int = 4, sampling: SamplingParams | None = None, **changes: Any
) -> Sequence:
    """A prompt of tokens that count up; `changes` are fields of `Sequence`."""
    return Sequence(
        request_id=f"sequence-{next(_numbers)}",
        token_ids=[100 + place for place in range(num_prompt_tokens)],
        num_prompt_tokens=num_prompt_tokens,
        sampling=sampling or SamplingParams(max_tokens=max_tokens),
        **changes,
    )


def add(scheduler: Scheduler, *args: int, **kwargs: Any) -> Sequence:
    """A sequence by `make_sequence`, queued."""
    sequence = make_sequence(*args, **kwargs)
    scheduler.add(sequence)
    return sequence


def launch(scheduler: Scheduler) -> Batch:
    """The next step, which must exist."""
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def complete(scheduler: Scheduler, batch: Batch, token_id: int = TOKEN) -> list[Completed]:
    """End a step in which each sampled sequence got `token_id`."""
    return scheduler.complete(batch, {item.sequence: (SampledToken(token_id),) for item in batch.sampled})


def step(scheduler: Scheduler) -> list[Completed]:
    return complete(scheduler, launch(scheduler))


def drive(scheduler: Scheduler, max_steps: int = 10_000) -> None:
    """Step until nothing waits or runs. That the scheduler always has a next step is the point."""
    for _ in range(max_steps):
        if scheduler.is_idle:
            return
        step(scheduler)
        assert_sound(scheduler)
    raise AssertionError(f"not idle after {max_steps} steps")


def shares(batch: Batch) -> dict[Sequence, int]:
    return {item.sequence: item.num_new_tokens for item in batch.items}


def assert_sound(scheduler: Scheduler, others: Iterable[list[int]] = ()) -> None:
    """What holds between any two calls. `others` are blocks of reservations and of hand-offs."""
    pool = scheduler.pool
    ledger, holders = pool.ledger(), pool.holders()
    assert sum(ledger.values()) == pool.num_blocks
    assert ledger[FREE] == pool.num_free == pool.num_blocks - len(holders)
    tables = [table for sequence in scheduler.running for table in sequence.block_tables]
    owned = Counter(itertools.chain.from_iterable([*tables, *others]))
    assert not [block for block, number in owned.items() if number > 1], "a block has two owners"
    used = Counter(block for block, kinds in holders.items() for _ in range(kinds.get(Holder.SEQUENCE.value, 0)))
    assert used == Counter(itertools.chain.from_iterable(tables)), "used blocks are those in running tables"
    assert len(scheduler.running) + scheduler.num_reserved <= scheduler.limits.max_num_seqs
    for sequence in scheduler.waiting:
        assert sequence not in scheduler.running
        assert sequence.block_tables == ([],), "who waits holds nothing"
        assert sequence.num_computed_tokens == 0
    for sequence in scheduler.running:
        assert sequence.finish_reason is None
        assert sequence.num_new_tokens > 0
        assert pool.num_blocks_for(sequence.num_computed_tokens) <= len(sequence.block_tables[0])


def assert_batch_sound(scheduler: Scheduler, batch: Batch) -> None:
    """What holds for a step that has just been scheduled."""
    block_size = scheduler.pool.block_size
    assert 0 < batch.num_tokens <= scheduler.limits.max_num_batched_tokens
    assert len({item.sequence for item in batch.items}) == len(batch.items)
    for item in batch.items:
        end = item.start + item.num_new_tokens
        assert item.sequence in scheduler.running
        assert item.num_new_tokens > 0
        assert item.start == item.sequence.num_computed_tokens
        assert item.token_ids == item.sequence.token_ids[item.start : end]
        assert item.block_tables[0] == item.sequence.block_tables[0]
        assert len(item.block_tables[0]) * block_size >= end
        assert item.is_sampled == (end == item.sequence.num_tokens)
    given = shares(batch)
    if any(number > 1 for number in given.values()):
        left_out = [one for one in scheduler.running if one.num_new_tokens == 1 and one not in given]
        assert not left_out, "prompts took the tokens of those that decode"


def assert_no_leaks(scheduler: Scheduler) -> None:
    """What every test of a worker ends in: all blocks free, nobody here."""
    assert scheduler.is_idle
    assert scheduler.num_reserved == 0
    assert scheduler.pool.holders() == {}
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
