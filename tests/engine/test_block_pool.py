"""The pool gives out whole requests or nothing, and knows each block's holders at any moment."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import FREE, Holder
from tests.engine.makers import make_pool

NUM_BLOCKS = 7


def test_gives_all_that_was_asked_for_or_nothing() -> None:
    pool = make_pool(4)
    assert pool.allocate(5, Holder.SEQUENCE) is None
    assert pool.num_free == 4
    blocks = pool.allocate(4, Holder.SEQUENCE)
    assert blocks is not None
    assert sorted(blocks) == [0, 1, 2, 3]
    assert pool.allocate(1, Holder.SEQUENCE) is None
    assert pool.allocate(0, Holder.SEQUENCE) == []


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_counts_a_begun_block_as_a_block(num_tokens: int, num_blocks: int) -> None:
    assert make_pool(block_size=4).num_blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize("holder", Holder)
def test_a_block_is_free_when_its_last_holder_lets_go(holder: Holder) -> None:
    pool = make_pool(2)
    blocks = pool.allocate(1, Holder.SEQUENCE) or []
    pool.hold(blocks, holder)
    pool.release(blocks, Holder.SEQUENCE)
    assert pool.ledger()[holder.value] == 1
    assert pool.num_free == 1
    pool.release(blocks, holder)
    assert pool.num_free == 2


def test_a_state_is_named_by_the_strongest_holder() -> None:
    pool = make_pool(1)
    blocks = pool.allocate(1, Holder.SEQUENCE) or []
    for holder in reversed(list(Holder)):
        if holder is not Holder.SEQUENCE:
            pool.hold(blocks, holder)
        assert pool.ledger() == dict.fromkeys([*Holder, FREE], 0) | {holder.value: 1}


def test_nobody_can_hold_a_free_block() -> None:
    pool = make_pool(1)
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.hold([0], Holder.PULLED)
    with pytest.raises(AssertionError, match="block 0 has no holder used"):
        pool.release([0], Holder.SEQUENCE)


def test_quarantined_blocks_are_not_usable() -> None:
    pool = make_pool(4)
    blocks = pool.allocate(3, Holder.WRITING) or []
    pool.move(blocks[:2], Holder.WRITING, Holder.QUARANTINED)
    assert (pool.num_usable, pool.num_held(Holder.QUARANTINED), pool.num_held(Holder.WRITING)) == (2, 2, 1)


def test_poisons_what_becomes_free_and_nothing_else() -> None:
    poisoned: list[int] = []
    pool = make_pool(4, poison=poisoned.extend)
    blocks = pool.allocate(3, Holder.SEQUENCE) or []
    pool.hold(blocks[:1], Holder.PULLED)
    pool.release(blocks, Holder.SEQUENCE)
    assert poisoned == blocks[1:]
    pool.release(blocks[:1], Holder.PULLED)
    assert sorted(poisoned) == sorted(blocks)


async def test_tells_who_waits_for_room_of_every_hold_that_ends() -> None:
    """Also of one that frees no block: whoever waits may wait for that kind of holder to let go."""
    pool = make_pool(2)
    changed: asyncio.Event = pool.freed.subscribe()
    blocks = pool.allocate(1, Holder.OFFERED) or []
    pool.hold(blocks, Holder.PULLED)
    assert not changed.is_set()
    for end in (
        lambda: pool.release(blocks, Holder.OFFERED),
        lambda: pool.move(blocks, Holder.PULLED, Holder.QUARANTINED),
        lambda: pool.release(blocks, Holder.QUARANTINED),
    ):
        end()
        assert changed.is_set()
        changed.clear()


class AnyUseOfAPool(RuleBasedStateMachine):
    """Against a model that is nothing but a bag of holders for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.poisoned: list[int] = []
        self.pool = make_pool(NUM_BLOCKS, poison=self.poisoned.extend)
        self.holds: dict[int, Counter[Holder]] = {block: Counter() for block in range(NUM_BLOCKS)}

    def free(self) -> set[int]:
        return {block for block, holds in self.holds.items() if not holds.total()}

    @rule(number=st.integers(0, NUM_BLOCKS + 1), holder=st.sampled_from(Holder))
    def allocate(self, number: int, holder: Holder) -> None:
        free = self.free()
        blocks = self.pool.allocate(number, holder)
        assert (blocks is None) == (number > len(free))
        if blocks is not None:
            assert len(set(blocks)) == number
            assert set(blocks) <= free
            for block in blocks:
                self.holds[block][holder] += 1

    @precondition(lambda self: len(self.free()) < NUM_BLOCKS)
    @rule(data=st.data(), holder=st.sampled_from(Holder))
    def hold(self, data: st.DataObject, holder: Holder) -> None:
        held = sorted(set(self.holds) - self.free())
        blocks = data.draw(st.lists(st.sampled_from(held), max_size=4))
        self.pool.hold(blocks, holder)
        for block in blocks:
            self.holds[block][holder] += 1

    @precondition(lambda self: len(self.free()) < NUM_BLOCKS)
    @rule(data=st.data(), becomes=st.none() | st.sampled_from(Holder))
    def release_or_move(self, data: st.DataObject, becomes: Holder | None) -> None:
        source = data.draw(st.sampled_from([kind for kind in Holder if any(h[kind] for h in self.holds.values())]))
        available = [block for block, holds in self.holds.items() for _ in range(holds[source])]
        blocks = data.draw(st.permutations(available))[: data.draw(st.integers(0, len(available)))]
        before = self.free()
        for block in blocks:
            self.holds[block][source] -= 1
            if becomes is not None:
                self.holds[block][becomes] += 1
        self.poisoned.clear()
        if becomes is None:
            self.pool.release(blocks, source)
        else:
            self.pool.move(blocks, source, becomes)
        assert sorted(self.poisoned) == sorted(self.free() - before)

    @invariant()
    def the_ledger_is_true(self) -> None:
        ledger = self.pool.ledger()
        states = [next((kind.value for kind in Holder if holds[kind]), FREE) for holds in self.holds.values()]
        assert ledger == dict.fromkeys([*Holder, FREE], 0) | Counter(states)
        assert self.pool.num_free == len(self.free())
        expected = {
            block: {kind.value: holds[kind] for kind in Holder if holds[kind]}
            for block, holds in self.holds.items()
            if holds.total()
        }
        assert self.pool.holders() == expected
        for kind in Holder:
            assert self.pool.num_held(kind) == sum(holds[kind] > 0 for holds in self.holds.values())


AnyUseOfAPool.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyUseOfAPool = AnyUseOfAPool.TestCase
