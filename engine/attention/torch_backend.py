"""Paged attention in plain torch: the reference that every other backend is compared with.

Decode rows: each block of each sequence is one row of a batched product; the rows' partial softmax
results are then merged by sequence (the split of Flash-Decoding with the block as its unit), so the
work is proportional to the tokens there are, with no padding. Prompt chunks: the context is walked in
tiles with the online softmax of FlashAttention, so no [chunk, context] matrix is kept; where torch has a
fused kernel for it, that is taken (`flash.py`).
"""

from __future__ import annotations

import torch

from engine.attention.context import AttentionContext, Chunk, DecodeRows, LayerArguments
from engine.attention.flash import attend_chunk, can_attend
from engine.kv_cache import LayerCache

_TILE_TOKENS = 512
_NEVER = float("-inf")


class TorchAttention:
    """`AttentionBackend` for any device. Softmax and its sums are float32."""

    def attend(
        self, query: torch.Tensor, layer: LayerCache, context: AttentionContext, arguments: LayerArguments
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        if context.decode is not None:
            output[context.decode.rows] = _decode(query[context.decode.rows], layer, context.decode, arguments)
        for chunk in context.chunks:
            if can_attend(query, arguments):
                output[chunk.rows] = attend_chunk(query[chunk.rows], layer, chunk, arguments.scaling)
            else:
                output[chunk.rows] = _chunk(query[chunk.rows], layer, chunk, arguments)
        return output


def _decode(query: torch.Tensor, layer: LayerCache, decode: DecodeRows, arguments: LayerArguments) -> torch.Tensor:
    """`query` is `[num_seqs, num_q_heads, head_dim]`."""
    num_seqs, num_q_heads, head_dim = query.shape
    num_kv_heads, block_size = layer.num_kv_heads, layer.block_size
    group = num_q_heads // num_kv_heads
    num_rows = decode.blocks.shape[0]
    keys, values = (
        layer.keys(decode.blocks),
        layer.values(decode.blocks),
    )  # [num_rows, num_kv_heads, block_size, head_dim]
    _zero_unwritten(values, decode)
    grouped = query.view(num_seqs, num_kv_heads, group, head_dim)[decode.owners]
    # each (block, head) is one small product: [num_rows * num_kv_heads, group, block_size]
    scores = torch.bmm(grouped.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)).float() * arguments.scaling
    scores = scores.view(num_rows, num_kv_heads, group, block_size)
    scores = _softcap(scores, arguments)
    positions = decode.starts[:, None] + torch.arange(block_size, device=query.device)
    lens = decode.context_lens[decode.owners, None]
    hidden = positions >= lens
    if arguments.sliding_window is not None:
        hidden |= positions < lens - arguments.sliding_window
    scores.masked_fill_(hidden[:, None, None], _NEVER)

    row_max = scores.amax(-1)  # [num_rows, num_kv_heads, group]
    index = decode.owners[:, None, None].expand(num_rows, num_kv_heads, group)
    seq_max = row_max.new_full((num_seqs, num_kv_heads, group), _NEVER).scatter_reduce(0, index, row_max, "amax")
    if arguments.sinks is not None:
        sinks = arguments.sinks.float().view(num_kv_heads, group)
        seq_max = torch.maximum(seq_max, sinks)
    weights = torch.exp(scores - seq_max[decode.owners, ..., None])
    partial = torch.bmm(weights.to(query.dtype).flatten(0, 1), values.flatten(0, 1)).float()
    partial = partial.view(num_rows, num_kv_heads, group, head_dim)
    sums = torch.zeros_like(seq_max).index_add_(0, decode.owners, weights.sum(-1))
    if arguments.sinks is not None:
        sums += torch.exp(sinks - seq_max)
    total = partial.new_zeros(num_seqs, num_kv_heads, group, head_dim).index_add_(0, decode.owners, partial)
    return (total / sums[..., None]).view(num_seqs, num_q_heads, head_dim).to(query.dtype)


def _zero_unwritten(values: torch.Tensor, decode: DecodeRows) -> None:
    """Clear the places of each last block that nobody has written: 0 x NaN would still be NaN."""
    positions = decode.starts[decode.tails, None] + torch.arange(values.shape[2], device=values.device)
    unwritten = positions >= decode.context_lens[:, None]
    values[decode.tails] = values[decode.tails].masked_fill(unwritten[:, None, :, None], 0.0)


def _chunk(query: torch.Tensor, layer: LayerCache, chunk: Chunk, arguments: LayerArguments) -> torch.Tensor:
    """`query` is `[num_tokens, num_q_heads, head_dim]`, the new tokens of one sequence."""
    num_tokens, num_q_heads, head_dim = query.shape
    num_kv_heads, block_size = layer.num_kv_heads, layer.block_size
    group = num_q_heads // num_kv_heads
    # [num_kv_heads, group * num_tokens, head_dim]: the heads that share K are rows of one product
    grouped = (
        query.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    )
    rows = grouped.shape[1]
    query_positions = torch.arange(chunk.start, chunk.start + num_tokens, device=query.device).repeat(group)[:, None]
    total = torch.zeros(num_kv_heads, rows, head_dim, device=query.device)
    if arguments.sinks is not None:
        highest = (
            arguments.sinks.float().view(num_kv_heads, group, 1).repeat(1, 1, num_tokens).view(num_kv_heads, rows, 1)
        )
        sums = torch.ones_like(highest)
    else:
        highest = torch.full((num_kv_heads, rows, 1), _NEVER, device=query.device)
        sums = torch.zeros_like(highest)

    context_len = chunk.start + num_tokens
    tile_tokens = max(1, _TILE_TOKENS // block_size) * block_size
    first = 0
    if arguments.sliding_window is not None:
        first = max(0, chunk.start - arguments.sliding_window + 1) // block_size * block_size
    for tile_start in range(first, context_len, tile_tokens):
        tile_len = min(tile_tokens, context_len - tile_start)
        blocks = chunk.block_table[tile_start // block_size : -(-(tile_start + tile_len) // block_size)]
        keys = layer.keys(blocks).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :tile_len]
        values = layer.values(blocks).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :tile_len]
        scores = torch.matmul(grouped, keys.transpose(1, 2)).float() * arguments.scaling
        scores = _softcap(scores, arguments)
        if tile_start + tile_len > chunk.start or arguments.sliding_window is not None:
            positions = torch.arange(tile_start, tile_start + tile_len, device=query.device)
            hidden = positions > query_positions
            if arguments.sliding_window is not None:
                hidden |= positions <= query_positions - arguments.sliding_window
            scores.masked_fill_(hidden, _NEVER)
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
        # a row that has seen no key yet has -inf here; exp(-inf - 0) is 0, exp(-inf + inf) would be NaN
        reference = new_highest.masked_fill(new_highest == _NEVER, 0.0)
        weights = torch.exp(scores - reference)
        decay = torch.exp(highest - reference)
        total = total * decay + torch.matmul(weights.to(query.dtype), values).float()
        sums = sums * decay + weights.sum(-1, keepdim=True)
        highest = new_highest
    output = (total / sums).view(num_kv_heads, group, num_tokens, head_dim).permute(2, 0, 1, 3)
    return output.reshape(num_tokens, num_q_heads, head_dim).to(query.dtype)


def _softcap(scores: torch.Tensor, arguments: LayerArguments) -> torch.Tensor:
    if arguments.softcap is None:
        return scores
    return torch.tanh(scores / arguments.softcap) * arguments.softcap
