"""Runs the model over a batch: tensors in, tokens out. Lives on the engine thread."""

from __future__ import annotations

import itertools

import torch

from engine.attention.context import AttentionContext, Chunk, DecodeRows
from engine.attention.paged import PagedAttention
from engine.attention.torch_backend import TorchAttention
from engine.batch import Batch, BatchItem
from engine.errors import EngineError, ModelRefused
from engine.kv_cache import KvCache
from engine.model_loader import LoadedModel, attach, use_reference_attention
from engine.output_stream import SampledToken
from engine.sampler import Sampler
from engine.sampling import SamplingParams
from engine.sequence import Sequence

_SELF_TEST_CHUNKS = (17, 1, 13, 1)


class ModelRunner:
    """`Runner` over a transformers model whose attention reads K and V from `cache`."""

    def __init__(self, loaded: LoadedModel, cache: KvCache) -> None:
        self.loaded = loaded
        self._cache = cache
        self._block_size = cache.shape.block_size
        self._attention = PagedAttention(cache, TorchAttention(), loaded.plan)
        self._sampler = Sampler(loaded.eos_token_ids)
        attach(loaded, self._attention)

    def run(self, batch: Batch) -> dict[Sequence, tuple[SampledToken, ...]]:
        sampled = batch.sampled
        with torch.inference_mode():
            logits = self._forward(batch.items)
            if not sampled:
                return {}
            tokens = self._sampler.sample(logits, [item.sequence for item in sampled])
        return {item.sequence: (token,) for item, token in zip(sampled, tokens, strict=True)}

    def self_test(self) -> None:
        """Compare a sequence computed whole by transformers' attention with the same one computed in
        chunks by ours. Raises `ModelRefused` when they differ: state outside attention shows here.
        Uses the first blocks of the cache, so nothing may run yet.
        """
        ends = list(itertools.accumulate(_SELF_TEST_CHUNKS))
        generator = torch.Generator().manual_seed(7)
        token_ids = torch.randint(0, self.loaded.vocab_size, (ends[-1],), generator=generator).tolist()
        num_blocks = -(-ends[-1] // self._block_size)
        if num_blocks > self._cache.num_blocks:
            raise EngineError(f"the KV cache has {self._cache.num_blocks} blocks; it needs {num_blocks} at least")
        table = list(range(num_blocks))[::-1]
        sequence = Sequence("self-test", token_ids, len(token_ids), SamplingParams(temperature=0.0))
        with torch.inference_mode():
            ours = torch.cat(
                [
                    self._forward((BatchItem(sequence, token_ids[end - length : end], end - length, (table,), True),))
                    for end, length in zip(ends, _SELF_TEST_CHUNKS, strict=True)
                ]
            ).float()
            use_reference_attention(self.loaded, True)
            reference: torch.Tensor = (
                self.loaded.model(
                    input_ids=torch.tensor([token_ids]), use_cache=False, logits_to_keep=torch.tensor(ends) - 1
                )
                .logits[0]
                .float()
            )
            use_reference_attention(self.loaded, False)
        errors = (ours - reference).norm(dim=-1) / reference.norm(dim=-1)
        # in half precision a near tie of an expert router may send one token another way; lost state sends them all
        error, limit = (errors.max(), 1e-3) if self.loaded.dtype == torch.float32 else (errors[1:].median(), 0.1)
        if not error < limit:
            raise ModelRefused(
                f"{self.loaded.model.config.model_type}: logits computed in chunks differ from the model's own by "
                f"{error:.3g} (limit {limit:g}): it keeps state that paged attention can't carry; not supported"
            )

    def _forward(self, items: tuple[BatchItem, ...]) -> torch.Tensor:
        """Logits of the sampled items, `[num_sampled, vocab_size]`."""
        token_ids = torch.tensor([list(itertools.chain.from_iterable(item.token_ids for item in items))])
        positions = torch.tensor(
            [list(itertools.chain.from_iterable(range(item.start, item.start + item.num_new_tokens) for item in items))]
        )
        ends = list(itertools.accumulate(item.num_new_tokens for item in items))
        keep = torch.tensor(
            [end - 1 for end, item in zip(ends, items, strict=True) if item.is_sampled], dtype=torch.int64
        )
        self._attention.context = make_context(items, positions[0], self._block_size)
        logits: torch.Tensor = self.loaded.model(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=keep
        ).logits[0]
        self._attention.context = None
        return logits


def make_context(items: tuple[BatchItem, ...], positions: torch.Tensor, block_size: int) -> AttentionContext:
    """What attention needs to know of a batch; `positions` is `[num_tokens]`."""
    slot_blocks: list[int] = []
    chunks = []
    rows: list[int] = []
    lens: list[int] = []
    blocks: list[int] = []
    owners: list[int] = []
    starts: list[int] = []
    tails: list[int] = []
    end = 0
    for item in items:
        (table,) = item.block_tables
        begin, end = end, end + item.num_new_tokens
        if item.num_new_tokens == 1:
            slot_blocks.append(table[item.start // block_size])
            num_blocks = item.start // block_size + 1
            owners += [len(rows)] * num_blocks
            blocks += table[:num_blocks]
            starts += range(0, num_blocks * block_size, block_size)
            tails.append(len(blocks) - 1)
            rows.append(begin)
            lens.append(item.start + 1)
        else:
            slot_blocks += [
                table[position // block_size] for position in range(item.start, item.start + item.num_new_tokens)
            ]
            num_blocks = -(-(item.start + item.num_new_tokens) // block_size)
            chunks.append(Chunk(slice(begin, end), item.start, torch.tensor(table[:num_blocks])))
    decode = None
    if rows:
        decode = DecodeRows(*(torch.tensor(part) for part in (rows, lens, blocks, owners, starts, tails)))
    return AttentionContext(torch.tensor(slot_blocks), positions % block_size, decode, tuple(chunks))
