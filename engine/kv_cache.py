"""The KV cache: block-major memory that attention and transfers share.

    storage   [num_blocks, block_nbytes]                                             uint8
    view      [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]        dtype

A block is one contiguous run of bytes: one message, one checksum. Heads lie outside layers, so a
tensor-parallel slice of a block is one run too. Index 0 of the fourth axis is K, 1 is V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvShape:
    """One group of layers with the same shape and retention."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # the larger of K's and V's; the rest is padding
    block_size: int
    dtype: torch.dtype

    @property
    def block_nbytes(self) -> int:
        return self.num_kv_heads * self.num_layers * 2 * self.block_size * self.head_dim * self.dtype.itemsize


class KvCache:
    """Memory for `num_blocks` blocks, allocated once. The system gives its pages as they are first written."""

    def __init__(self, shape: KvShape, num_blocks: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.storage = torch.zeros(num_blocks, shape.block_nbytes, dtype=torch.uint8)
        self.view = self.storage.view(shape.dtype).view(
            num_blocks, shape.num_kv_heads, shape.num_layers, 2, shape.block_size, shape.head_dim
        )

    def layer(self, index: int, num_kv_heads: int | None = None) -> LayerCache:
        """One layer's part. `num_kv_heads` where this layer has fewer than the cache."""
        return LayerCache(self, index, num_kv_heads or self.shape.num_kv_heads)

    def memory(self, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of each block, writable and contiguous, for a transfer."""
        return [self.storage[block].numpy().data for block in blocks]

    def poison(self, blocks: list[int]) -> None:
        """Fill with NaN, so that a test sees whoever reads a freed block."""
        self.view[torch.tensor(blocks)] = torch.nan


class LayerCache:
    """One layer's K and V in every block.

    The K (or V) of one head in one block is a contiguous row `[block_size, head_dim]`; whole rows are
    gathered, which is twenty times faster than indexing the strided view.
    """

    def __init__(self, cache: KvCache, index: int, num_kv_heads: int) -> None:
        shape = cache.shape
        self.num_kv_heads = num_kv_heads
        self.block_size = shape.block_size
        self.head_dim = shape.head_dim
        self._rows = cache.view.view(-1, shape.block_size * shape.head_dim)
        self._slots = cache.view.view(-1, shape.head_dim)
        self._row_offsets = (torch.arange(num_kv_heads) * shape.num_layers + index) * 2
        self._rows_per_block = shape.num_kv_heads * shape.num_layers * 2

    def keys(self, blocks: torch.Tensor) -> torch.Tensor:
        """A copy of K in `blocks` `[n]`: `[n, num_kv_heads, block_size, head_dim]`."""
        return self._gather(self._row_numbers(blocks))

    def values(self, blocks: torch.Tensor) -> torch.Tensor:
        """A copy of V in `blocks` `[n]`: `[n, num_kv_heads, block_size, head_dim]`."""
        return self._gather(self._row_numbers(blocks) + 1)

    def write(self, blocks: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put `[num_tokens, num_kv_heads, head_dim]` K and V into the places `(blocks, offsets)`."""
        slots = (self._row_numbers(blocks) * self.block_size + offsets[:, None]).flatten()
        self._slots.index_copy_(0, slots, key.reshape(-1, self.head_dim))
        self._slots.index_copy_(0, slots + self.block_size, value.reshape(-1, self.head_dim))

    def _row_numbers(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks[:, None] * self._rows_per_block + self._row_offsets

    def _gather(self, row_numbers: torch.Tensor) -> torch.Tensor:
        rows = self._rows.index_select(0, row_numbers.flatten())
        return rows.view(-1, self.num_kv_heads, self.block_size, self.head_dim)
