"""Anything that workers do to a scheduler, in any order: nothing leaks, nobody starves, no block has two owners."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.batch import Batch
from engine.block_pool import FREE, Holder
from engine.errors import RequestRefused
from engine.output_stream import SampledToken
from engine.sequence import Sequence
from tests.engine.makers import (
    EOS,
    TOKEN,
    add,
    assert_batch_sound,
    assert_no_leaks,
    assert_sound,
    drive,
    make_scheduler,
    make_sequence,
)

lengths = st.integers(1, 14)
priorities = st.sampled_from((0, 0, 0, 1))


@dataclass(eq=False)
class Arriving:
    """A reservation whose KV is on its way."""

    blocks: list[int]
    sequence: Sequence


@dataclass(eq=False)
class Pulled:
    """An open transfer that reads a hand-off's blocks."""

    blocks: list[int]


@dataclass
class Outside:
    """What the roles around a scheduler hold."""

    arriving: list[Arriving] = field(default_factory=list)
    offered: list[Sequence] = field(default_factory=list)
    pulls: list[Pulled] = field(default_factory=list)
    quarantined: list[int] = field(default_factory=list)


class AnyWorker(RuleBasedStateMachine):
    """Both roles at once on one scheduler: more than one worker ever does, so any order that it can see."""

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.sampled_from((1, 2, 4)),
        max_num_seqs=st.integers(1, 4),
        spare_tokens=st.integers(0, 8),
    )
    def start(self, num_blocks: int, block_size: int, max_num_seqs: int, spare_tokens: int) -> None:
        self.scheduler = make_scheduler(num_blocks, block_size, max_num_seqs, max_num_seqs + spare_tokens)
        self.pool = self.scheduler.pool
        self.outside = Outside()
        self.batch: Batch | None = None
        self.accepted: list[Sequence] = []
        self.aborted: set[Sequence] = set()
        self.failed: set[Sequence] = set()

    @rule(num_prompt_tokens=lengths, max_tokens=lengths, priority=priorities, is_handed_over=st.booleans())
    def add(self, num_prompt_tokens: int, max_tokens: int, priority: int, is_handed_over: bool) -> None:
        sequence = make_sequence(
            num_prompt_tokens, max_tokens, priority=priority, ends_after_first_token=is_handed_over
        )
        total = num_prompt_tokens + (0 if is_handed_over else max_tokens)
        fits = self.pool.num_blocks_for(total) <= self.pool.num_blocks
        try:
            self.scheduler.add(sequence)
        except RequestRefused:
            assert not fits
        else:
            assert fits
            self.accepted.append(sequence)

    @precondition(lambda self: self.batch is None)
    @rule()
    def launch(self) -> None:
        scheduler = self.scheduler
        self.failed.update(scheduler.take_hopeless())
        before = {sequence: sequence.num_preemptions for sequence in [*scheduler.running, *scheduler.waiting]}
        running = list(scheduler.running)
        self.batch = scheduler.schedule()
        victims = [one for one in running if one.num_preemptions > before[one]]
        spared = [one for one in running if one not in victims and not one.ends_after_first_token]
        for victim, other in itertools.product(victims, spared):
            assert (victim.priority, victim.arrival) > (other.priority, other.arrival)
        assert not any(victim.ends_after_first_token for victim in victims)
        admitted = [one for one in scheduler.running if one in victims or one not in running]
        for new, waiting in itertools.product(admitted, scheduler.waiting):
            assert _turn(new) < _turn(waiting), "it was not its turn"
        if self.batch is not None:
            assert_batch_sound(scheduler, self.batch)

    @precondition(lambda self: self.batch is not None)
    @rule(ends=st.sets(st.integers(0, 3)), fails=st.sampled_from((False, False, False, True)))
    def end_step(self, ends: set[int], fails: bool) -> None:
        batch, self.batch = self.batch, None
        assert batch is not None
        if fails:
            wanted = [item.sequence for item in batch.items if item.sequence in self.scheduler.running]
            assert self.scheduler.fail(batch) == wanted
            self.failed.update(wanted)
            return
        sampled = {
            item.sequence: (SampledToken(EOS if place in ends else TOKEN),) for place, item in enumerate(batch.sampled)
        }
        for done in self.scheduler.complete(batch, sampled):
            assert done.sequence not in self.aborted
            if done.tokens and done.sequence.ends_after_first_token:
                self.outside.offered.append(done.sequence)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.accepted))
        is_here = self.scheduler.has(sequence)
        self.scheduler.abort(sequence)
        assert not self.scheduler.has(sequence)
        if is_here:
            self.aborted.add(sequence)

    @rule(num_prompt_tokens=lengths, max_tokens=st.integers(2, 9), priority=priorities)
    def reserve(self, num_prompt_tokens: int, max_tokens: int, priority: int) -> None:
        sequence = make_sequence(num_prompt_tokens, max_tokens, priority=priority)
        head = self.scheduler.waiting.head
        try:
            self.scheduler.check(sequence)
        except RequestRefused:
            return
        blocks = self.scheduler.reserve(num_prompt_tokens + 1, Holder.WRITING)
        if blocks is not None:
            assert head is None or not head.num_preemptions
            self.outside.arriving.append(Arriving(blocks, sequence))

    @precondition(lambda self: self.outside.arriving)
    @rule(data=st.data(), outcome=st.sampled_from(("arrives", "arrives", "lost", "stuck")))
    def end_of_pull_here(self, data: st.DataObject, outcome: str) -> None:
        arriving = data.draw(st.sampled_from(self.outside.arriving))
        self.outside.arriving.remove(arriving)
        if outcome == "arrives":
            sequence = arriving.sequence
            sequence.block_tables = (arriving.blocks,)
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.token_ids.append(TOKEN)
            self.pool.move(arriving.blocks, Holder.WRITING, Holder.SEQUENCE)
            self.scheduler.add_running(sequence)
            self.accepted.append(sequence)
        elif outcome == "lost":
            self.pool.release(arriving.blocks, Holder.WRITING)
        else:
            self.pool.move(arriving.blocks, Holder.WRITING, Holder.QUARANTINED)
            self.outside.quarantined += arriving.blocks
        self.scheduler.settle()

    @precondition(
        lambda self: any(one.ends_after_first_token for one in self.scheduler.running) or self.outside.offered
    )
    @rule(data=st.data())
    def begin_of_pull_from_here(self, data: st.DataObject) -> None:
        growing = [one for one in self.scheduler.running if one.ends_after_first_token]
        blocks = list(data.draw(st.sampled_from([*growing, *self.outside.offered])).block_tables[0])
        self.pool.hold(blocks, Holder.PULLED)
        self.outside.pulls.append(Pulled(blocks))

    @precondition(lambda self: self.outside.pulls)
    @rule(data=st.data())
    def end_of_pull_from_here(self, data: st.DataObject) -> None:
        pull = data.draw(st.sampled_from(self.outside.pulls))
        self.outside.pulls.remove(pull)
        self.pool.release(pull.blocks, Holder.PULLED)

    @precondition(lambda self: self.outside.offered)
    @rule(data=st.data())
    def end_of_lease(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.outside.offered))
        self.outside.offered.remove(sequence)
        self.pool.release(sequence.block_tables[0], Holder.OFFERED)

    @invariant()
    def all_is_sound(self) -> None:
        offered = [sequence.block_tables[0] for sequence in self.outside.offered]
        assert_sound(self.scheduler, [*(one.blocks for one in self.outside.arriving), *offered])

    @invariant()
    def what_a_step_uses_is_held_and_nobody_elses(self) -> None:
        if self.batch is None:
            return
        holders = self.pool.holders()
        arriving = {block for one in self.outside.arriving for block in one.blocks}
        for item in self.batch.items:
            blocks = set(item.block_tables[0])
            assert blocks <= set(holders)
            assert not blocks & arriving
            others = [one for one in self.scheduler.running if one is not item.sequence]
            assert not any(blocks & set(one.block_tables[0]) for one in others)

    def teardown(self) -> None:
        """Those around let go, and then everybody is served, or was refused, aborted or failed."""
        if not hasattr(self, "scheduler"):
            return
        outside, scheduler = self.outside, self.scheduler
        for arriving in outside.arriving:
            self.pool.release(arriving.blocks, Holder.WRITING)
            scheduler.settle()
        outside.arriving.clear()
        for _ in range(2000):
            if self.batch is not None:
                self.end_step(set(), False)
            for pull in outside.pulls:
                self.pool.release(pull.blocks, Holder.PULLED)
            for sequence in outside.offered:
                self.pool.release(sequence.block_tables[0], Holder.OFFERED)
            outside.pulls.clear()
            outside.offered.clear()
            if scheduler.is_idle:
                break
            num_failed = len(self.failed)
            self.launch()
            assert self.batch is not None or len(self.failed) > num_failed or self.is_hopeless()
        assert scheduler.is_idle, "somebody is never served"
        for sequence in self.accepted:
            is_served = sequence.is_finished or (sequence.ends_after_first_token and sequence.num_output_tokens == 1)
            assert is_served + (sequence in self.aborted) + (sequence in self.failed) == 1
        assert self.pool.ledger() == dict.fromkeys([*Holder, FREE], 0) | {
            "quarantined": len(outside.quarantined),
            "free": self.pool.num_blocks - len(outside.quarantined),
        }

    def is_hopeless(self) -> bool:
        """It has just been preempted for the last time: the next turn fails it."""
        head = self.scheduler.waiting.head
        return head is not None and self.pool.num_blocks_for(head.num_tokens) > self.pool.num_usable


def _turn(sequence: Sequence) -> tuple[bool, int, int]:
    return sequence.num_preemptions == 0, sequence.priority, sequence.arrival


AnyWorker.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyWorker = AnyWorker.TestCase


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(lengths, lengths, priorities), min_size=1, max_size=12),
    num_blocks=st.integers(1, 12),
    block_size=st.sampled_from((1, 3, 4)),
    max_num_seqs=st.integers(1, 5),
    spare_tokens=st.integers(0, 10),
)
def test_whatever_fits_is_served_whole(
    requests: list[tuple[int, int, int]], num_blocks: int, block_size: int, max_num_seqs: int, spare_tokens: int
) -> None:
    scheduler = make_scheduler(num_blocks, block_size, max_num_seqs, max_num_seqs + spare_tokens)
    sequences = []
    for num_prompt_tokens, max_tokens, priority in requests:
        if scheduler.pool.num_blocks_for(num_prompt_tokens + max_tokens) > num_blocks:
            with pytest.raises(RequestRefused):
                add(scheduler, num_prompt_tokens, max_tokens, priority=priority)
        else:
            sequences.append(add(scheduler, num_prompt_tokens, max_tokens, priority=priority))
    drive(scheduler)
    for sequence in sequences:
        assert (sequence.num_output_tokens, sequence.finish_reason) == (sequence.sampling.max_tokens, "length")
    assert_no_leaks(scheduler)
