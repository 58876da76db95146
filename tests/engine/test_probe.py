"""What the probe makes of a model's attention calls, and why it refuses: each reason on its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from engine.errors import ModelRefused
from engine.probe import AttentionCall, check_config, plan_attention, record_mask

MAX_MODEL_LEN = 512
CONFIG = SimpleNamespace(model_type="some", num_hidden_layers=2, max_position_embeddings=MAX_MODEL_LEN)


def make_call(layer_index: int = 0, **changes: Any) -> AttentionCall:
    call = AttentionCall(
        layer_index=layer_index,
        num_q_heads=4,
        num_kv_heads=2,
        k_dim=16,
        v_dim=16,
        window=None,
        is_causal=True,
        mask=make_mask(causal_mask_function),
        keywords=frozenset({"scaling", "dropout"}),
    )
    return replace(call, **changes)


def make_mask(function: Any, local_size: int | None = None) -> torch.Tensor:
    return record_mask(1, 6, 6, function, local_size)


def plan(*calls: AttentionCall) -> Any:
    return plan_attention(CONFIG, list(calls), MAX_MODEL_LEN)


def test_layers_are_places_in_the_cache_with_the_largest_shape_of_all() -> None:
    made = plan(make_call(1, k_dim=24, v_dim=12, num_kv_heads=4), make_call(0))
    assert made.cache_layers == {0: 0, 1: 1}
    assert made.num_kv_heads == {0: 2, 1: 4}
    assert made.head_dim == 24
    assert made.windows == {0: None, 1: None}


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({"window": 8, "mask": make_mask(sliding_window_causal_mask_function(8), 8)}, 8),
        ({"mask": make_mask(sliding_window_causal_mask_function(8), 8)}, 8),
        ({"window": 8, "mask": None}, 8),
        ({"window": 1, "mask": make_mask(sliding_window_causal_mask_function(1), 1)}, 1),
        ({"window": 511, "mask": make_mask(sliding_window_causal_mask_function(511), 511)}, 511),
        ({"window": 512, "mask": make_mask(sliding_window_causal_mask_function(512), 512)}, None),
        ({"window": 4096, "mask": make_mask(sliding_window_causal_mask_function(4096), 4096)}, None),
        ({}, None),
        ({"mask": None}, None),
    ],
)
def test_a_window_comes_from_the_keyword_or_else_from_the_mask(change: dict[str, Any], window: int | None) -> None:
    assert plan(make_call(0, **change), make_call(1)).windows[0] == window


def chunked(_b: int, _h: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key <= query) & (key // 32 == query // 32)


def bidirectional(_b: int, _h: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.tensor(True)


def late(_b: int, _h: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Causal, but for the last position that may ever come."""
    return (key <= query) & (query < MAX_MODEL_LEN - 1)


OTHER_MASK = "layer 0 uses a mask other than causal or sliding window"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_index": -1}, "attention modules carry no layer_idx; not supported"),
        ({"mask": torch.zeros(1, 1, 6, 6)}, "layer 0 builds a mask of its own; not supported"),
        ({"mask": make_mask(causal_mask_function)[:, :, :3]}, "layer 0 builds a mask of its own; not supported"),
        ({"mask": make_mask(chunked, 32)}, OTHER_MASK),
        ({"mask": make_mask(bidirectional)}, OTHER_MASK),
        ({"mask": make_mask(late)}, OTHER_MASK),
        ({"mask": make_mask(sliding_window_causal_mask_function(9), 8)}, OTHER_MASK),
        ({"window": 7, "mask": make_mask(sliding_window_causal_mask_function(8), 8)}, OTHER_MASK),
        ({"mask": None, "is_causal": False}, "layer 0 lets tokens see what comes after them"),
        ({"keywords": frozenset({"scaling", "position_bias"})}, "attention argument position_bias is not supported"),
        ({"keywords": frozenset({"indices"})}, "attention argument indices is not supported"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelRefused, match=f"^some: {message}"):
        plan(make_call(**change), make_call(1))


def test_refuses_a_model_that_never_calls() -> None:
    with pytest.raises(ModelRefused, match="some: model code does not use the attention interface; not supported"):
        plan()


def test_refuses_layers_that_call_twice() -> None:
    with pytest.raises(ModelRefused, match="some: calls attention 2 times per layer; not supported"):
        plan(make_call(0), make_call(1), make_call(1))


def test_refuses_a_model_some_of_whose_layers_never_call() -> None:
    with pytest.raises(ModelRefused, match=r"some: layers \[0\] keep recurrent/conv state or bypass attention"):
        plan(make_call(1))


@pytest.mark.parametrize(
    ("config", "asked_for", "length"),
    [
        ({"max_position_embeddings": 64}, None, 64),
        ({"max_position_embeddings": 64}, 32, 32),
        ({"n_positions": 64}, None, 64),
        ({}, None, 2048),
        ({}, 100_000, 100_000),
        ({"max_position_embeddings": 64, "layer_types": ["full_attention", "sliding_attention"]}, None, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "llama3"}}, None, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"full_attention": {"rope_type": "linear"}}}, None, 64),
    ],
)
def test_serves_the_length_asked_for_or_else_the_models_own(
    config: dict[str, Any], asked_for: int | None, length: int
) -> None:
    assert check_config(SimpleNamespace(model_type="some", **config), asked_for) == length


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layers_block_type": ["attention", "mamba"]}, "layers of kind mamba keep recurrent or convolution state"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}}, "rope type dynamic .* <= 64"),
        ({"layer_types": ["chunked_attention"], "attention_chunk_size": 16}, "chunked attention .* <= 16"),
        (
            {"layer_types": ["chunked_attention"], "attention_chunk_size": 99, "attn_temperature_tuning": True},
            "attn_temperature_tuning must be off",
        ),
    ],
)
def test_refuses_by_configuration(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelRefused, match=message):
        check_config(SimpleNamespace(model_type="some", max_position_embeddings=64, **config), 65)
