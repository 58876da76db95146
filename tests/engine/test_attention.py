"""What every attention backend must compute: softmax over what a token may see, whatever the batch and the blocks.

One suite for all of them, against a naive reference in float64. The cache is full of NaN where nothing was written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.context import AttentionBackend
from engine.attention.paged import PagedAttention
from engine.attention.torch_backend import TorchAttention
from engine.batch import BatchItem
from engine.kv_cache import KvCache, KvShape
from engine.model_runner import make_context
from engine.probe import AttentionPlan
from tests.engine.makers import make_sequence

BACKENDS: dict[str, type[AttentionBackend]] = {"torch": TorchAttention}
NUM_LAYERS, LAYER = 3, 1
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 3e-2}

every_backend = pytest.mark.parametrize("name", BACKENDS)


@dataclass(frozen=True)
class Case:
    """Sequences are `(num_computed_tokens, num_new_tokens)`."""

    sequences: tuple[tuple[int, int], ...] = ((0, 5), (37, 1), (0, 1), (20, 17), (15, 1), (16, 1), (30, 2))
    num_q_heads: int = 4
    num_kv_heads: int = 2
    k_dim: int = 64
    v_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    seed: int = 0


class Computed:
    """A case's inputs, written into a cache in random blocks, and its output by one backend."""

    def __init__(self, case: Case, backend: AttentionBackend) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        self.scaling = case.k_dim**-0.5
        self.sinks = self.random(case.num_q_heads) if case.has_sinks else None
        num_blocks = [-(-(start + new) // case.block_size) for start, new in case.sequences]
        self.cache = KvCache(
            KvShape(
                num_layers=NUM_LAYERS,
                num_kv_heads=case.num_kv_heads + 1,  # another layer of this model has more heads
                head_dim=max(case.k_dim, case.v_dim),
                block_size=case.block_size,
                dtype=case.dtype,
            ),
            sum(num_blocks) + 3,
        )
        self.cache.poison(list(range(self.cache.num_blocks)))
        order = torch.randperm(self.cache.num_blocks, generator=self.generator).tolist()
        self.tables = [[order.pop() for _ in range(number)] for number in num_blocks]
        plan = AttentionPlan(
            cache_layers={LAYER: LAYER},
            windows={LAYER: case.window},
            num_kv_heads={LAYER: case.num_kv_heads},
            head_dim=self.cache.shape.head_dim,
        )
        self.attention = PagedAttention(self.cache, backend, plan)
        lengths = [start + new for start, new in case.sequences]
        self.queries = [self.random(length, case.num_q_heads, case.k_dim) for length in lengths]
        self.keys = [self.random(length, case.num_kv_heads, case.k_dim) for length in lengths]
        self.values = [self.random(length, case.num_kv_heads, case.v_dim) for length in lengths]
        self._run([(0, start) for start, _ in case.sequences])
        self.output = self._run(list(case.sequences))  # [num_tokens, num_q_heads, v_dim]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.case.dtype)

    def _run(self, parts: list[tuple[int, int]]) -> torch.Tensor:
        """Those tokens of each sequence in one step."""
        items = tuple(
            BatchItem(make_sequence(1), [0] * new, start, (table,), True)
            for (start, new), table in zip(parts, self.tables, strict=True)
            if new
        )
        if not items:
            return torch.empty(0)
        positions = torch.cat([torch.arange(start, start + new) for start, new in parts])
        self.attention.context = make_context(items, positions, self.case.block_size)
        module = torch.nn.Module()
        module.layer_idx = LAYER
        query, key, value = (
            torch.cat([one[start : start + new] for one, (start, new) in zip(tensors, parts, strict=True)])
            for tensors in (self.queries, self.keys, self.values)
        )
        packed = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        output, weights = self.attention(
            module, *packed, None, scaling=self.scaling, softcap=self.case.softcap, s_aux=self.sinks
        )
        assert weights is None
        assert output.dtype == self.case.dtype
        return output[0]

    def reference(self) -> torch.Tensor:
        case = self.case
        rows = []
        for (start, new), query, key, value in zip(case.sequences, self.queries, self.keys, self.values, strict=True):
            group = case.num_q_heads // case.num_kv_heads
            key, value = (one.double().repeat_interleave(group, 1) for one in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query[start:].double(), key) * self.scaling
            if case.softcap is not None:
                scores = torch.tanh(scores / case.softcap) * case.softcap
            q, k = torch.arange(start, start + new)[:, None], torch.arange(start + new)
            hidden = (k > q) if case.window is None else (k > q) | (k <= q - case.window)
            scores = scores.masked_fill(hidden, -math.inf)
            if self.sinks is not None:  # one more key that everybody sees, without a value
                sink = self.sinks.double()[:, None, None].expand(-1, new, 1)
                weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            rows.append(torch.einsum("hqk,khd->qhd", weights, value))
        return torch.cat(rows)


def check(case: Case, name: str) -> None:
    computed = Computed(case, BACKENDS[name]())
    torch.testing.assert_close(
        computed.output.double(), computed.reference(), atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype]
    )


@every_backend
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_q_heads": 1, "num_kv_heads": 1},
        {"num_q_heads": 6, "num_kv_heads": 2},
        {"num_q_heads": 8, "num_kv_heads": 1},
        {"num_q_heads": 8, "num_kv_heads": 8},
        {"k_dim": 80, "v_dim": 80},
        {"k_dim": 128, "v_dim": 128},
        {"k_dim": 256, "v_dim": 256},
        {"k_dim": 24, "v_dim": 12},
        {"k_dim": 12, "v_dim": 33},
        {"block_size": 1},
        {"block_size": 48},
        {"window": 1},
        {"window": 8},
        {"window": 16, "block_size": 16},
        {"window": 1000},
        {"softcap": 2.0},
        {"has_sinks": True},
        {"has_sinks": True, "softcap": 5.0, "window": 9, "num_q_heads": 6, "v_dim": 7},
    ],
    ids=str,
)
def test_a_mixed_batch_equals_the_reference(change: dict[str, int], dtype: torch.dtype, name: str) -> None:
    check(replace(Case(dtype=dtype), **change), name)


@every_backend
@pytest.mark.parametrize("change", [{}, {"window": 700}, {"softcap": 30.0}], ids=str)
@pytest.mark.parametrize(
    "sequences",
    [
        ((4095, 1), (0, 1), (511, 1), (512, 1)),
        ((3800, 296), (1, 1)),
        ((0, 1100),),
        ((511, 2), (512, 2), (510, 3), (1023, 2)),
    ],
    ids=str,
)
def test_long_contexts_equal_the_reference(
    sequences: tuple[tuple[int, int], ...], change: dict[str, int], name: str
) -> None:
    check(replace(Case(sequences, num_q_heads=3, num_kv_heads=1), **change), name)


@every_backend
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_batch_equals_the_reference(data: st.DataObject, name: str) -> None:
    num_kv_heads = data.draw(st.integers(1, 3), "num_kv_heads")
    case = Case(
        sequences=tuple(data.draw(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20)), min_size=1, max_size=6))),
        num_q_heads=num_kv_heads * data.draw(st.integers(1, 8), "group"),
        num_kv_heads=num_kv_heads,
        k_dim=data.draw(st.sampled_from((8, 20, 64)), "k_dim"),
        v_dim=data.draw(st.sampled_from((8, 13, 64)), "v_dim"),
        block_size=data.draw(st.sampled_from((1, 3, 16, 48)), "block_size"),
        window=data.draw(st.none() | st.integers(1, 80), "window"),
        softcap=data.draw(st.none() | st.sampled_from((0.5, 30.0)), "softcap"),
        has_sinks=data.draw(st.booleans(), "has_sinks"),
        seed=data.draw(st.integers(0, 9), "seed"),
    )
    check(case, name)


@every_backend
def test_a_sequence_does_not_depend_on_its_neighbours(name: str) -> None:
    """Bitwise, as far as the same rows are computed: another user's tokens must not show."""
    case = Case(((40, 1), (3, 9)))
    alone = Computed(case, BACKENDS[name]())
    other = Computed(case, BACKENDS[name]())
    other.keys[1].fill_(1e4)
    other.values[1].fill_(-1e4)
    other._run([(0, start) for start, _ in case.sequences])
    assert torch.equal(alone.output[0], other._run(list(case.sequences))[0])


@every_backend
def test_attention_changes_only_the_slots_of_the_new_tokens(name: str) -> None:
    computed = Computed(Case(((5, 3), (16, 1))), BACKENDS[name]())
    written = ~computed.cache.view.isnan()
    expected = torch.zeros_like(written)
    for (start, new), table in zip(computed.case.sequences, computed.tables, strict=True):
        for position in range(start + new):
            expected[table[position // 16], : computed.case.num_kv_heads, LAYER, :, position % 16] = True
    assert torch.equal(written, expected)


class LargestTensor(TorchDispatchMode):
    """The most elements that any operation inside the block returned."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() < self.cache_nbytes:
                self.num_elements = max(self.num_elements, tensor.numel())
        return result

    def __init__(self, cache: KvCache) -> None:
        super().__init__()
        self.cache_nbytes = cache.storage.nbytes


@every_backend
def test_a_chunk_keeps_no_matrix_of_chunk_by_context(name: str) -> None:
    case = Case(((3840, 256),), num_q_heads=4, num_kv_heads=2)
    computed = Computed(case, BACKENDS[name]())
    with LargestTensor(computed.cache) as largest:
        computed._run(list(case.sequences))
    tile = 256 * 512 * case.num_q_heads
    assert largest.num_elements <= tile < 256 * 4096 * case.num_q_heads


@every_backend
def test_decode_pads_no_context_to_the_longest(name: str) -> None:
    case = Case(((4000, 1), *((5, 1),) * 31), num_q_heads=2, num_kv_heads=2)
    computed = Computed(case, BACKENDS[name]())
    with LargestTensor(computed.cache) as largest:
        computed._run(list(case.sequences))
    num_slots = sum(map(len, computed.tables)) * case.block_size
    assert largest.num_elements <= num_slots * case.num_kv_heads * case.k_dim
