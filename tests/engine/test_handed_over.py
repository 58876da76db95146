"""What the scheduler does for sequences that arrive from elsewhere, and for those that leave for elsewhere."""

from __future__ import annotations

from engine.block_pool import Holder
from tests.engine.makers import TOKEN, add, launch, make_scheduler, make_sequence, shares, step


def test_a_reservation_takes_blocks_and_a_place_or_nothing() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_seqs=2)
    first = scheduler.reserve(9, Holder.WRITING)
    assert first is not None
    assert len(first) == 3
    assert scheduler.reserve(24, Holder.WRITING) is None
    assert scheduler.reserve(20, Holder.WRITING) is not None
    assert scheduler.reserve(0, Holder.WRITING) is None  # no place is left
    scheduler.pool.release(first, Holder.WRITING)
    scheduler.settle()
    assert scheduler.reserve(1, Holder.WRITING) is not None


def test_a_place_that_is_reserved_is_not_given_to_another() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_seqs=1)
    blocks = scheduler.reserve(6, Holder.WRITING) or []
    local = add(scheduler, 2, max_tokens=1)
    assert scheduler.schedule() is None
    arrived = make_sequence(5, max_tokens=3, num_computed_tokens=5, block_tables=(blocks,))
    arrived.token_ids.append(TOKEN)
    scheduler.pool.move(blocks, Holder.WRITING, Holder.SEQUENCE)
    scheduler.add_running(arrived)
    scheduler.settle()
    assert shares(launch(scheduler)) == {arrived: 1}
    assert local in scheduler.waiting


def test_a_reservation_leaves_the_watermark_while_something_runs() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    assert scheduler.reserve(16, Holder.WRITING) is not None
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    add(scheduler, 1)
    step(scheduler)
    assert scheduler.reserve(12, Holder.WRITING) is None
    assert scheduler.reserve(8, Holder.WRITING) is not None


def test_preempted_sequences_go_before_reservations() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    first, second = add(scheduler, 4, max_tokens=8), add(scheduler, 4, max_tokens=8)
    while not second.num_preemptions:
        step(scheduler)
    assert scheduler.pool.num_free == 2
    assert scheduler.reserve(1, Holder.WRITING) is None
    while first.finish_reason is None:
        step(scheduler)
    step(scheduler)
    assert scheduler.reserve(1, Holder.WRITING) is not None


def test_a_handed_over_sequence_leaves_and_its_blocks_stay_offered() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    sequence = add(scheduler, 6, ends_after_first_token=True)
    (done,) = step(scheduler)
    assert (done.finish_reason, len(done.tokens)) == (None, 1)
    assert not scheduler.has(sequence)
    scheduler.abort(sequence)
    assert scheduler.pool.ledger()["offered"] == len(sequence.block_tables[0]) == 2


def test_no_new_prompt_starts_while_more_than_half_of_the_pool_is_offered() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    offered = add(scheduler, 20, ends_after_first_token=True)
    while scheduler.has(offered):
        step(scheduler)
    add(scheduler, 4, ends_after_first_token=True)
    assert scheduler.schedule() is None
    scheduler.pool.release(offered.block_tables[0][:1], Holder.OFFERED)
    assert scheduler.schedule() is not None
