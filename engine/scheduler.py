"""The one scheduler: continuous batching by the step (ORCA), chunked prefill mixed with decode
(Sarathi-Serve), preemption by recompute. A role is a policy on it, never a second one.

Life of a sequence:

    add --> waiting --schedule: all its blocks or none--> running --complete--> finished
             ^   `--take_hopeless--> failed                |   |
             `-------------- preempted: blocks freed ------'   `--> handed over: its blocks are offered

    reserve --> its KV arrives from elsewhere --add_running--> running, and settle
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import Batch, BatchItem
from engine.block_pool import BlockPool, Holder
from engine.errors import RequestRefused
from engine.output_stream import SampledToken
from engine.sequence import Sequence
from engine.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Completed:
    """What a step did for a sequence that is still wanted."""

    sequence: Sequence
    tokens: tuple[SampledToken, ...]
    finish_reason: str | None


class Scheduler:
    """All control state of an engine. Every method runs on the event loop and returns at once.

    A step is three calls: `schedule`, run (elsewhere), `complete`. Frees of what a launched step
    uses apply at `complete`; at most one step is launched.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting = WaitingQueue()
        self.running: dict[Sequence, None] = {}  # an ordered set
        self.num_preemptions = 0
        self.num_reserved = 0  # places of sequences whose KV is still under way
        self.step = 0
        self._launched: dict[Sequence, BatchItem] = {}
        self._step_blocks: list[int] = []  # held by the launched step alone
        self._num_arrivals = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def check(self, sequence: Sequence) -> None:
        """Raises `RequestRefused` for what can never run here."""
        num_prompt_tokens, max_tokens = sequence.num_prompt_tokens, sequence.sampling.max_tokens
        total = num_prompt_tokens + max_tokens
        if num_prompt_tokens < 1:
            raise RequestRefused("the prompt is empty")
        if total > self.limits.max_model_len:
            raise RequestRefused(
                f"{num_prompt_tokens} prompt tokens + max_tokens {max_tokens} = {total} is more than the model's "
                f"length {self.limits.max_model_len}; shorten the prompt or lower max_tokens"
            )
        num_stored = sequence.num_tokens if sequence.ends_after_first_token else total
        if self.pool.num_blocks_for(num_stored) > self.pool.num_blocks:
            raise RequestRefused(
                f"{num_stored} tokens need {self.pool.num_blocks_for(num_stored)} KV blocks and this worker has "
                f"{self.pool.num_blocks}; shorten the request or raise --kv-cache-gb"
            )
        if sequence.num_output_tokens >= max_tokens:
            raise RequestRefused(f"all {max_tokens} of max_tokens are there already")

    def has(self, sequence: Sequence) -> bool:
        """Whether the sequence waits or runs here."""
        return sequence in self.running or sequence in self.waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of its priority. Raises `RequestRefused`."""
        self.check(sequence)
        self._number(sequence)
        self.waiting.add(sequence)

    def add_running(self, sequence: Sequence) -> None:
        """Take a sequence whose KV is in its blocks already, held as `SEQUENCE`. It has a reserved
        place, which is settled after this.
        """
        self._number(sequence)
        self.running[sequence] = None

    def reserve(self, num_tokens: int, holder: Holder) -> list[int] | None:
        """Blocks and a place for a sequence of `num_tokens` that will arrive from elsewhere, all or
        none; pair it with `settle`.

        Leaves the watermark free for running sequences to grow, and lets preempted sequences go
        first: `None` means "not now".
        """
        num_blocks = self.pool.num_blocks_for(num_tokens)
        if self.waiting.head is not None and self.waiting.head.num_preemptions:
            return None
        if self._num_places <= 0 or self.pool.num_free < num_blocks + self._watermark():
            return None
        self.num_reserved += 1
        return self.pool.allocate(num_blocks, holder)

    def settle(self) -> None:
        """A reserved place is taken by a sequence that runs by now, or given back."""
        assert self.num_reserved > 0
        self.num_reserved -= 1
        self.pool.freed.notify()

    @property
    def _num_places(self) -> int:
        """Sequences that may still join `running`."""
        return self.limits.max_num_seqs - len(self.running) - self.num_reserved

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence, in whatever state. Its blocks are free now, or when the step that runs
        is complete. A sequence that is not here (finished, handed over) is no error.
        """
        if sequence in self.running:
            del self.running[sequence]
            self._let_go(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def take_hopeless(self) -> list[Sequence]:
        """Remove and return the sequences at the head of the queue that the pool can't hold any more,
        since a part of it is quarantined: they must fail, and not keep those behind them waiting.
        """
        hopeless = []
        while (head := self.waiting.head) and self.pool.num_blocks_for(head.num_tokens) > self.pool.num_usable:
            self.waiting.remove(head)
            hopeless.append(head)
        return hopeless

    def schedule(self) -> Batch | None:
        """Choose the next step: decode tokens first, then chunks, then new sequences. `None`: nothing
        can run now.
        """
        assert not self._launched, "one step at a time"
        budget = self.limits.max_num_batched_tokens
        shares: dict[Sequence, int] = {}  # how many new tokens each brings
        for sequence in sorted(self.running, key=_service_order):
            if sequence not in self.running or budget == 0:  # preempted by one before it, or no budget left
                continue
            num_tokens = min(sequence.num_new_tokens, budget)
            for victim in self._grow(sequence, num_tokens):
                budget += shares.pop(victim, 0)
            if sequence in self.running:
                shares[sequence] = num_tokens
                budget -= num_tokens
        while budget > 0 and (admitted := self._admit()) is not None:
            shares[admitted] = min(admitted.num_new_tokens, budget)
            budget -= shares[admitted]
        if not shares:
            return None
        self.step += 1
        self._launched = {sequence: BatchItem.of(sequence, num_tokens) for sequence, num_tokens in shares.items()}
        return Batch(tuple(self._launched.values()), self.step)

    def complete(self, batch: Batch, sampled: dict[Sequence, tuple[SampledToken, ...]]) -> list[Completed]:
        """Apply a step's result. Sequences that were aborted meanwhile are dropped."""
        self._launched = {}
        completed = []
        for item in batch.items:
            sequence = item.sequence
            if sequence not in self.running:
                continue
            sequence.num_computed_tokens = item.start + item.num_new_tokens
            tokens = self._append(sequence, sampled.get(sequence, ()))
            assert bool(tokens) == item.is_sampled, "a sampled sequence has tokens, and no other has"
            if sequence.is_finished or (tokens and sequence.ends_after_first_token):
                del self.running[sequence]
                if sequence.ends_after_first_token:
                    self.pool.move(_blocks(sequence), Holder.SEQUENCE, Holder.OFFERED)
                else:
                    self._let_go(sequence)
            completed.append(Completed(sequence, tokens, sequence.finish_reason))
        self._free_step_blocks()
        return completed

    def fail(self, batch: Batch) -> list[Sequence]:
        """The step raised: forget its sequences and return those that were still wanted."""
        self._launched = {}
        failed = [item.sequence for item in batch.items if item.sequence in self.running]
        for sequence in failed:
            del self.running[sequence]
            self._let_go(sequence)
        self._free_step_blocks()
        return failed

    def finish_reason(self, sequence: Sequence, token_id: int) -> str | None:
        """Whether `token_id`, just appended, ends the sequence."""
        sampling = sequence.sampling
        if sequence.num_output_tokens >= sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                return "stop"
            if token_id in self.limits.eos_token_ids and not sampling.ignore_eos:
                return "stop"
        if sequence.num_output_tokens >= sampling.max_tokens or sequence.num_tokens >= self.limits.max_model_len:
            return "length"
        return None

    def _append(self, sequence: Sequence, tokens: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """Append until one ends the sequence; returns those that were taken."""
        for number, token in enumerate(tokens, start=1):
            sequence.token_ids.append(token.token_id)
            sequence.finish_reason = self.finish_reason(sequence, token.token_id)
            if sequence.is_finished or sequence.ends_after_first_token:
                return tokens[:number]
        return tokens

    def _admit(self) -> Sequence | None:
        """Move the first waiting sequence to running, with every block of what it has."""
        sequence = self.waiting.head
        if sequence is None or self._num_places <= 0:
            return None
        if sequence.ends_after_first_token and self.pool.num_held(Holder.OFFERED) * 2 > self.pool.num_blocks:
            return None  # finished hand-offs hold their half: decode must pull first
        num_blocks = self.pool.num_blocks_for(sequence.num_tokens)
        if self.pool.num_free < num_blocks + self._watermark():
            return None
        blocks = self.pool.allocate(num_blocks, Holder.SEQUENCE)
        assert blocks is not None
        self.waiting.remove(sequence)
        sequence.block_tables = (blocks,)
        self.running[sequence] = None
        return sequence

    def _grow(self, sequence: Sequence, num_tokens: int) -> list[Sequence]:
        """Give it the blocks for `num_tokens` more. Returns those that were preempted to make room:
        the newest of the lowest priority first, itself when it is the one.
        """
        needed = self.pool.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_tables[0])
        victims: list[Sequence] = []
        while needed > 0 and sequence in self.running:
            if (blocks := self.pool.allocate(needed, Holder.SEQUENCE)) is not None:
                sequence.block_tables[0].extend(blocks)
                break
            victim = max(filter(_can_be_preempted, self.running), key=_preemption_order)
            self._preempt(victim)
            victims.append(victim)
        return victims

    def _preempt(self, sequence: Sequence) -> None:
        """Free its blocks; it goes to the head of the queue and is computed again from its tokens."""
        del self.running[sequence]
        self._let_go(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """Release the blocks now, or leave them to the step that is using them."""
        blocks = _blocks(sequence)
        sequence.block_tables = tuple([] for _ in sequence.block_tables)
        if sequence in self._launched:
            self.pool.move(blocks, Holder.SEQUENCE, Holder.STEP)
            self._step_blocks += blocks
        else:
            self.pool.release(blocks, Holder.SEQUENCE)

    def _free_step_blocks(self) -> None:
        blocks, self._step_blocks = self._step_blocks, []
        self.pool.release(blocks, Holder.STEP)

    def _watermark(self) -> int:
        """Blocks kept free while something runs, so that an admission isn't at once a preemption."""
        return max(1, self.pool.num_blocks // 100) if self.running else 0

    def _number(self, sequence: Sequence) -> None:
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1


def _blocks(sequence: Sequence) -> list[int]:
    return [block for table in sequence.block_tables for block in table]


def _service_order(sequence: Sequence) -> tuple[bool, int, int]:
    """Decode tokens before prompts, so that whoever streams is not held up."""
    return sequence.num_new_tokens > 1, sequence.priority, sequence.arrival


def _can_be_preempted(sequence: Sequence) -> bool:
    """Not one that is handed over: a pull may be reading its blocks. It never grows, so it ends soon."""
    return not sequence.ends_after_first_token


def _preemption_order(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival
