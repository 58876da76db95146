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
    """Memory for `num_blocks` blocks, allocated and touched once."""

    def __init__(self, shape: KvShape, num_blocks: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.storage = torch.zeros(num_blocks, shape.block_nbytes, dtype=torch.uint8)
        self.view = self.storage.view(shape.dtype).view(
            num_blocks, shape.num_kv_heads, shape.num_layers, 2, shape.block_size, shape.head_dim
        )

    def layer(self, index: int) -> torch.Tensor:
        """One layer's part: `[num_blocks, num_kv_heads, 2, block_size, head_dim]`, a strided view."""
        return self.view[:, :, index]

    def memory(self, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of each block, writable and contiguous, for a transfer."""
        return [memoryview(self.storage[block].numpy()) for block in blocks]

    def poison(self, blocks: list[int]) -> None:
        """Fill with NaN, so that a test sees whoever reads a freed block."""
        self.view[torch.tensor(blocks)] = torch.nan
