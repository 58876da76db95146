"""Where each token of the running step finds its K and V: made once a step, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kv_cache import LayerCache


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several new tokens of one sequence, at positions `start..start+num_tokens-1`."""

    rows: slice  # of the batch's tokens
    start: int
    block_table: torch.Tensor  # [num_blocks] int64

    @property
    def num_tokens(self) -> int:
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """All sequences that bring one token, flattened to one row for each block that they read."""

    rows: torch.Tensor  # [num_seqs] int64: their places in the batch
    context_lens: torch.Tensor  # [num_seqs] int64: keys that each sees, its own token included
    blocks: torch.Tensor  # [num_rows] int64
    owners: torch.Tensor  # [num_rows] int64: which of the num_seqs reads this block
    starts: torch.Tensor  # [num_rows] int64: position of the block's first key
    tails: torch.Tensor  # [num_seqs] int64: the row of each sequence's last block


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """The running step, as attention sees it. New tokens are packed: `[1, num_tokens]`."""

    slot_blocks: torch.Tensor  # [num_tokens] int64: the block that each new token's K and V go to
    slot_offsets: torch.Tensor  # [num_tokens] int64: and the place in it
    decode: DecodeRows | None
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """What the model's code says of one attention call."""

    scaling: float
    sliding_window: int | None = None  # key k is visible to query q iff q - window < k <= q
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [num_q_heads]


class AttentionBackend(Protocol):
    """Paged attention over one layer of the cache."""

    def attend(
        self, query: torch.Tensor, layer: LayerCache, context: AttentionContext, arguments: LayerArguments
    ) -> torch.Tensor:
        """Attention of `query` `[num_tokens, num_q_heads, head_dim]` over K and V in `layer`, where the
        step's own K and V already are. Returns `[num_tokens, num_q_heads, head_dim]` in the query's
        dtype. Changes nothing.
        """
        ...
