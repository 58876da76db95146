"""Which block is held by whom. The single truth about the KV cache's memory.

A block is free only when nobody holds it. Holders are counted by kind, so that the ledger can say
at any moment who has what:

    allocate(SEQUENCE)        move(SEQUENCE -> OFFERED)       release(OFFERED)
    free ------------> used ---------------------------> offered ------------> free
                        |  hold(PULLED): an open transfer reads it           ^
                        |  move(SEQUENCE -> STEP): aborted while a step runs |
                        `---------------------------> step ------------------'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

from engine.signal import Signal


class Holder(StrEnum):
    """Kinds of holders, in the precedence by which a block's one state is named."""

    QUARANTINED = "quarantined"  # a transfer did not let go in time: never given out again
    WRITING = "writing"  # a pull may write into it
    STEP = "step"  # a launched step uses it, its sequence is gone
    PULLED = "pulled"  # an open transfer reads it
    OFFERED = "offered"  # a finished hand-off
    SEQUENCE = "used"


FREE = "free"

_BITS = {holder: 1 << place for place, holder in enumerate(Holder)}
# by the set of kinds that hold a block, as bits: its one state
_STATES = [
    next((holder.value for holder in Holder if kinds & _BITS[holder]), FREE) for kinds in range(1 << len(Holder))
]


class BlockPool:
    """Blocks `0..num_blocks-1` of `block_size` tokens. Single writer: the event loop."""

    def __init__(self, num_blocks: int, block_size: int, poison: Callable[[list[int]], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.freed = Signal()  # notified whenever holds are dropped: what waits for room may look again
        self._poison = poison
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holds = {holder: [0] * num_blocks for holder in Holder}  # by kind, how many each block has
        self._kinds = [0] * num_blocks  # the kinds of which a block has any, as bits
        self._num_held = dict.fromkeys(Holder, 0)
        self._num_in_state = {**{holder.value: 0 for holder in Holder}, FREE: num_blocks}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that can still become free: all but the quarantined."""
        return self.num_blocks - self._num_held[Holder.QUARANTINED]

    def num_held(self, holder: Holder) -> int:
        """How many blocks have at least one holder of this kind."""
        return self._num_held[holder]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int, holder: Holder) -> list[int] | None:
        """Take free blocks, all or none: `None` means "not now"."""
        if num_blocks > len(self._free):
            return None
        split = len(self._free) - num_blocks
        blocks = self._free[split:]
        del self._free[split:]
        blocks.reverse()
        for block in blocks:
            self._add(block, holder)
        return blocks

    def hold(self, blocks: Iterable[int], holder: Holder) -> None:
        """Add one hold of this kind to each block. Somebody must have the block already."""
        for block in blocks:
            assert self._kinds[block], f"block {block} is free: allocate it"
            self._add(block, holder)

    def release(self, blocks: Iterable[int], holder: Holder) -> None:
        """Drop one hold of this kind from each block; those without any holder become free."""
        freed = []
        for block in blocks:
            self._drop(block, holder)
            if not self._kinds[block]:
                freed.append(block)
        if freed and self._poison is not None:
            self._poison(freed)
        self._free.extend(reversed(freed))
        self.freed.notify()

    def move(self, blocks: Iterable[int], source: Holder, target: Holder) -> None:
        """Turn one hold into another, with no moment in between."""
        blocks = list(blocks)
        self.hold(blocks, target)
        for block in blocks:
            self._drop(block, source)
        self.freed.notify()

    def ledger(self) -> dict[str, int]:
        """Blocks by state, each counted once by the precedence of `Holder`. The sum is the pool."""
        return dict(self._num_in_state)

    def holders(self) -> dict[int, dict[str, int]]:
        """Every block that is not free, with its holders by kind: for `/debug/ledger`."""
        return {
            block: {holder.value: self._holds[holder][block] for holder in Holder if self._holds[holder][block]}
            for block in range(self.num_blocks)
            if self._kinds[block]
        }

    def _add(self, block: int, holder: Holder) -> None:
        holds = self._holds[holder]
        holds[block] += 1
        if holds[block] == 1:
            self._num_held[holder] += 1
            self._toggle(block, holder)

    def _drop(self, block: int, holder: Holder) -> None:
        holds = self._holds[holder]
        assert holds[block] > 0, f"block {block} has no holder {holder}"
        holds[block] -= 1
        if holds[block] == 0:
            self._num_held[holder] -= 1
            self._toggle(block, holder)

    def _toggle(self, block: int, holder: Holder) -> None:
        """This kind came to the block, or left it."""
        kinds = self._kinds[block]
        self._num_in_state[_STATES[kinds]] -= 1
        kinds ^= _BITS[holder]
        self._num_in_state[_STATES[kinds]] += 1
        self._kinds[block] = kinds
