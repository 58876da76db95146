"""A prompt chunk by torch's fused CPU kernel: plain causal attention, no mask to build.

The context before the chunk is seen whole, the chunk itself causally; the two parts are merged by their
log-sum-exps. Measured against the tiled path of `torch_backend.py`: 2.5 to 4 times less CPU time.
"""

from __future__ import annotations

import torch

from engine.attention.context import Chunk, LayerArguments
from engine.kv_cache import LayerCache

_TILE_TOKENS = 2048  # so much of the context is gathered at once


def can_attend(query: torch.Tensor, arguments: LayerArguments) -> bool:
    """Windows, soft caps, sinks and other devices take the tiled path."""
    is_plain = arguments.sliding_window is None and arguments.softcap is None and arguments.sinks is None
    return is_plain and query.device.type == "cpu"


def attend_chunk(query: torch.Tensor, layer: LayerCache, chunk: Chunk, scaling: float) -> torch.Tensor:
    """`query` is `[num_tokens, num_q_heads, head_dim]`, the new tokens of one sequence; so is the result."""
    num_tokens, num_q_heads, head_dim = query.shape
    group = num_q_heads // layer.num_kv_heads
    by_head = query.transpose(0, 1)[None]  # [1, num_q_heads, num_tokens, head_dim]
    own_keys, own_values = _gather(layer, chunk, chunk.start, chunk.start + num_tokens)
    parts = [
        _fused(by_head, own_keys.repeat_interleave(group, 1), own_values.repeat_interleave(group, 1), scaling, True)
    ]
    # heads that share K are rows of one product: [1, num_kv_heads, group * num_tokens, head_dim]
    grouped = by_head.reshape(1, layer.num_kv_heads, group * num_tokens, head_dim)
    tile_tokens = max(1, _TILE_TOKENS // layer.block_size) * layer.block_size
    for start in range(0, chunk.start, tile_tokens):
        keys, values = _gather(layer, chunk, start, min(start + tile_tokens, chunk.start))
        output, log_sum = _fused(grouped, keys, values, scaling, False)
        shape = (1, num_q_heads, num_tokens)
        parts.append((output.reshape(*shape, head_dim), log_sum.reshape(shape)))
    return _merge(parts)[0].transpose(0, 1)


def _gather(layer: LayerCache, chunk: Chunk, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of positions `start..stop-1`, each `[1, num_kv_heads, stop - start, head_dim]`."""
    first = start // layer.block_size
    blocks = chunk.block_table[first : -(-stop // layer.block_size)]
    inside = slice(start - first * layer.block_size, stop - first * layer.block_size)

    def positions(rows: torch.Tensor) -> torch.Tensor:
        return rows.transpose(0, 1).reshape(1, layer.num_kv_heads, -1, layer.head_dim)[:, :, inside]

    return positions(layer.keys(blocks)), positions(layer.values(blocks))


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in the query's dtype and its log-sum-exp `[1, num_heads, num_rows]` in float32."""
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scaling
    )
    return output, log_sum


def _merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The output over all keys from the outputs over disjoint parts of them."""
    if len(parts) == 1:
        return parts[0][0]
    total = torch.stack([log_sum for _, log_sum in parts]).logsumexp(0)
    merged = sum(output.float() * torch.exp(log_sum - total)[..., None] for output, log_sum in parts)
    assert isinstance(merged, torch.Tensor)
    return merged.to(parts[0][0].dtype)
