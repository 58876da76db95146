"""One step's work: so many new tokens of so many sequences. A prompt chunk and a decode token are
the same thing (the interface of vLLM's v1 scheduler)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A snapshot, so that the event loop may abort the sequence while the engine thread reads this.

    `token_ids` are the new tokens, at positions `start..start+len-1`. `block_tables` are lists that
    nobody changes before the step is complete.
    """

    sequence: Sequence
    token_ids: list[int]
    start: int
    block_tables: tuple[list[int], ...]
    is_sampled: bool  # the last new token is the sequence's last: its logits choose the next

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> BatchItem:
        """The next `num_tokens` of a sequence that has the blocks for them."""
        start = sequence.num_computed_tokens
        return cls(
            sequence=sequence,
            token_ids=sequence.token_ids[start : start + num_tokens],
            start=start,
            block_tables=sequence.block_tables,
            is_sampled=start + num_tokens == sequence.num_tokens,
        )

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_prompt(self) -> bool:
        """A part of a prompt, or of a sequence that is computed again; not one decode token."""
        return len(self.token_ids) > 1 or self.start < self.sequence.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """Made by `Scheduler.schedule`, dead after `Scheduler.complete`."""

    items: tuple[BatchItem, ...]
    step: int

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    @property
    def sampled(self) -> list[BatchItem]:
        return [item for item in self.items if item.is_sampled]
