"""Who runs, who waits, who is preempted, and what each step brings: one scheduler, without a model."""

from __future__ import annotations

import time

import pytest

from engine.block_pool import Holder
from engine.errors import RequestRefused
from engine.output_stream import SampledToken
from engine.sampling import SamplingParams
from tests.engine.makers import (
    EOS,
    TOKEN,
    add,
    assert_no_leaks,
    assert_sound,
    complete,
    drive,
    launch,
    make_scheduler,
    make_sequence,
    shares,
    step,
)


def test_a_prompt_is_read_in_chunks_and_the_last_one_makes_the_first_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    sequence = add(scheduler, 10, max_tokens=2)
    made = [step(scheduler)[0] for _ in range(4)]
    assert [len(done.tokens) for done in made] == [0, 0, 1, 1]
    assert [done.finish_reason for done in made] == [None, None, None, "length"]
    assert sequence.token_ids[10:] == [TOKEN, TOKEN]
    assert_no_leaks(scheduler)


def test_decode_tokens_come_first_then_chunks_then_new_sequences() -> None:
    scheduler = make_scheduler(num_blocks=20, max_num_batched_tokens=6)
    first = add(scheduler, 3)
    step(scheduler)
    second = add(scheduler, 9)
    batch = launch(scheduler)
    assert shares(batch) == {first: 1, second: 5}
    complete(scheduler, batch)
    third = add(scheduler, 2)
    assert shares(launch(scheduler)) == {first: 1, second: 4, third: 1}


def test_a_small_prompt_does_not_overtake_the_large_one_before_it() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    running = add(scheduler, 4, max_tokens=3)
    step(scheduler)
    large, small = add(scheduler, 12, max_tokens=1), add(scheduler, 1, max_tokens=1)
    batch = launch(scheduler)
    assert shares(batch) == {running: 1}
    complete(scheduler, batch)
    assert list(scheduler.waiting) == [large, small]
    drive(scheduler)
    assert large.finish_reason == small.finish_reason == "length"


def test_a_smaller_priority_is_served_first_and_equals_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    sequences = [add(scheduler, 1, max_tokens=1, priority=priority) for priority in (1, 0, 1, -1, 0)]
    served = [step(scheduler)[0].sequence for _ in sequences]
    assert [sequences.index(sequence) for sequence in served] == [3, 1, 4, 0, 2]


def test_the_newest_of_the_lowest_priority_is_preempted_and_returns_first() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    keeper = add(scheduler, 4, max_tokens=9)
    lower = add(scheduler, 4, max_tokens=9, priority=1)
    older = add(scheduler, 4, max_tokens=9)
    step(scheduler)  # three blocks, all full
    batch = launch(scheduler)  # each needs one more and two are left
    assert shares(batch) == {keeper: 1, older: 1}
    assert scheduler.waiting.head is lower
    assert (lower.num_preemptions, scheduler.num_preemptions) == (1, 1)
    complete(scheduler, batch)
    newcomer = add(scheduler, 1, max_tokens=1, priority=-5)
    assert list(scheduler.waiting) == [lower, newcomer]
    drive(scheduler)
    assert lower.token_ids[4:] == [TOKEN] * 9
    assert_no_leaks(scheduler)


def test_a_victim_takes_no_part_in_the_step() -> None:
    """Nor does its token count, when the one that grows comes after it: as one with a draft will."""
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=8)
    older, younger = add(scheduler, 6, max_tokens=9), add(scheduler, 1, max_tokens=9)
    step(scheduler)
    older.token_ids += [TOKEN] * 7
    assert shares(launch(scheduler)) == {older: 7}
    assert younger.num_preemptions == 1


def test_whoever_cannot_grow_alone_steps_aside_for_what_else_holds_the_pool() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    sequence = add(scheduler, 4, max_tokens=5)
    others = scheduler.pool.allocate(2, Holder.OFFERED) or []
    step(scheduler)
    assert scheduler.schedule() is None
    assert scheduler.waiting.head is sequence
    assert scheduler.take_hopeless() == []
    scheduler.pool.release(others, Holder.OFFERED)
    drive(scheduler)
    assert sequence.finish_reason == "length"


def test_whoever_can_never_grow_again_is_given_up() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    sequence, behind = add(scheduler, 8, max_tokens=4), add(scheduler, 2, max_tokens=1)
    step(scheduler)
    (block,) = scheduler.pool.allocate(1, Holder.WRITING) or []
    scheduler.pool.move([block], Holder.WRITING, Holder.QUARANTINED)
    assert scheduler.schedule() is None  # it can't grow, and steps aside
    assert scheduler.take_hopeless() == [sequence]
    drive(scheduler)
    assert behind.finish_reason == "length"
    assert scheduler.pool.ledger() == scheduler.pool.ledger() | {"quarantined": 1, "free": 2}


def test_a_sequence_whose_blocks_may_be_pulled_is_never_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_batched_tokens=2)
    decoding = add(scheduler, 4, max_tokens=12)
    step(scheduler)
    step(scheduler)
    handed_over = add(scheduler, 12, ends_after_first_token=True)
    while not decoding.num_preemptions:
        step(scheduler)
    assert handed_over in scheduler.running
    step(scheduler)
    assert handed_over.num_preemptions == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompt_tokens": 0}, "the prompt is empty"),
        ({"num_prompt_tokens": 37, "max_tokens": 4}, r"= 41 is more than the model's length 40; shorten the prompt"),
        ({"num_prompt_tokens": 30, "max_tokens": 3}, r"33 tokens need 9 KV blocks and this worker has 8; shorten"),
    ],
)
def test_refuses_at_the_door_what_can_never_fit(changes: dict[str, int], message: str) -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_model_len=40)
    with pytest.raises(RequestRefused, match=message):
        add(scheduler, **changes)
    assert scheduler.is_idle


def test_serves_what_just_fits() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_model_len=32)
    sequence = add(scheduler, 28, max_tokens=4)
    drive(scheduler)
    assert (sequence.num_tokens, sequence.finish_reason) == (32, "length")


def test_a_prompt_that_is_handed_over_needs_room_for_itself_only() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    sequence = add(scheduler, 8, max_tokens=100, ends_after_first_token=True)
    step(scheduler)
    assert scheduler.pool.num_held(Holder.OFFERED) == 2
    assert not scheduler.has(sequence)


def test_refuses_a_resumed_sequence_that_has_all_its_tokens() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(7, max_tokens=3, num_emitted_tokens=3)
    sequence.num_prompt_tokens = 4
    with pytest.raises(RequestRefused, match="all 3 of max_tokens are there already"):
        scheduler.add(sequence)


def test_a_resumed_sequence_counts_what_was_emitted() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(7, max_tokens=5, num_emitted_tokens=3)
    sequence.num_prompt_tokens = 4
    scheduler.add(sequence)
    drive(scheduler)
    assert (sequence.num_output_tokens, sequence.finish_reason) == (5, "length")


@pytest.mark.parametrize(
    ("sampling", "token_id", "num_tokens", "reason"),
    [
        (SamplingParams(max_tokens=6), TOKEN, 6, "length"),
        (SamplingParams(max_tokens=1), TOKEN, 1, "length"),
        (SamplingParams(max_tokens=6), EOS, 1, "stop"),
        (SamplingParams(max_tokens=6, ignore_eos=True), EOS, 6, "length"),
        (SamplingParams(max_tokens=6, stop_token_ids=(TOKEN,)), TOKEN, 1, "stop"),
        (SamplingParams(max_tokens=6, stop_token_ids=(TOKEN,), ignore_eos=True), TOKEN, 1, "stop"),
        (SamplingParams(max_tokens=6, min_tokens=3), EOS, 3, "stop"),
        (SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=(TOKEN,)), TOKEN, 3, "stop"),
    ],
)
def test_ends_for_the_right_reason(sampling: SamplingParams, token_id: int, num_tokens: int, reason: str) -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(3, sampling=sampling)
    scheduler.add(sequence)
    while not scheduler.is_idle:
        complete(scheduler, launch(scheduler), token_id)
    assert (sequence.num_output_tokens, sequence.finish_reason) == (num_tokens, reason)


def test_tokens_after_the_one_that_ends_are_dropped() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, 3, max_tokens=9)
    batch = launch(scheduler)
    (done,) = scheduler.complete(batch, {sequence: (SampledToken(5), SampledToken(EOS), SampledToken(6))})
    assert [token.token_id for token in done.tokens] == [5, EOS]
    assert sequence.token_ids[3:] == [5, EOS]


def test_blocks_of_an_aborted_sequence_come_back_when_its_step_ends() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    sequence = add(scheduler, 8)
    batch = launch(scheduler)
    scheduler.abort(sequence)
    assert scheduler.pool.ledger()["step"] == 2
    assert scheduler.reserve(12, Holder.WRITING) is None
    assert complete(scheduler, batch) == []
    assert_no_leaks(scheduler)


def test_blocks_of_a_sequence_that_the_step_left_out_come_back_at_once() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=4)
    first, left_out = add(scheduler, 2), add(scheduler, 2)
    step(scheduler)
    for sequence in (first, left_out):
        sequence.token_ids += [TOKEN] * 4  # as with a draft; both together are more than a step takes
    assert shares(launch(scheduler)) == {first: 4}
    scheduler.abort(left_out)
    assert scheduler.pool.ledger()["step"] == 0
    assert_sound(scheduler)


def test_aborting_twice_or_what_is_not_here_is_no_error() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, 3)
    scheduler.abort(sequence)
    scheduler.abort(sequence)
    scheduler.abort(make_sequence(3))
    assert_no_leaks(scheduler)


def test_a_failed_step_returns_those_that_are_still_wanted() -> None:
    scheduler = make_scheduler()
    wanted, unwanted = add(scheduler, 3), add(scheduler, 3)
    batch = launch(scheduler)
    queued = add(scheduler, 3)
    scheduler.abort(unwanted)
    assert scheduler.fail(batch) == [wanted]
    assert list(scheduler.waiting) == [queued]
    drive(scheduler)
    assert_no_leaks(scheduler)


def test_a_step_of_256_sequences_takes_the_event_loop_no_more_than_a_millisecond() -> None:
    """The best of many, on this thread's own clock: what the code needs (0.7 ms), not what the machine spares.
    Twice that is for slower processors.
    """
    scheduler = make_scheduler(num_blocks=4096, block_size=16, max_num_seqs=256, max_num_batched_tokens=512)
    for _ in range(256):
        add(scheduler, 100, max_tokens=200)
    while scheduler.waiting or any(sequence.num_new_tokens > 1 for sequence in scheduler.running):
        step(scheduler)
    times = []
    for _ in range(50):
        started_at = time.thread_time()
        batch = launch(scheduler)
        scheduled_at = time.thread_time()
        sampled = {item.sequence: (SampledToken(TOKEN),) for item in batch.sampled}
        run_at = time.thread_time()
        scheduler.complete(batch, sampled)
        times.append(time.thread_time() - run_at + scheduled_at - started_at)
    assert min(times) < 2e-3
