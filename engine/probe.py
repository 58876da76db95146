"""One small forward pass at load that finds out what the model's code really asks of attention.

Most architectures of transformers work with our attention and no model code of ours; most of the
others would fail silently: state outside attention, a mask of their own, a keyword that we don't
know. The probe refuses those by name. It runs the model once on six equal tokens with an attention
function that records every call, and a mask function that keeps what the mask would have been.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.errors import ModelRefused

NUM_PROBE_TOKENS = 6
_DEFAULT_MODEL_LEN = 2048  # of a model that names no limit
_READ = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
_HARMLESS = frozenset(
    {
        "dropout", "position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states",
        "is_causal", "cache_position", "logits_to_keep", "return_dict", "cache", "past_key_values",
    }
)  # fmt: skip
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})


class MaskRecord(torch.Tensor):
    """A mask that remembers the function it was made of. `[1, 1, num_tokens, num_tokens]`."""

    mask_function: Callable[..., Any]
    local_size: int | None


def record_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    **_: Any,
) -> MaskRecord:
    """Registered with transformers as the probe's mask function."""
    mask: MaskRecord = torch.zeros(batch_size, 1, q_length, kv_length, dtype=torch.bool).as_subclass(MaskRecord)
    mask.mask_function = mask_function
    mask.local_size = local_size
    return mask


@dataclass(frozen=True, slots=True)
class AttentionCall:
    layer_index: int
    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None
    is_causal: bool
    mask: torch.Tensor | None
    keywords: frozenset[str]


@dataclass(slots=True)
class ProbeAttention:
    """Stands in for `PagedAttention` during the probe: plain causal attention that takes notes."""

    calls: list[AttentionCall] = field(default_factory=list)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        self.calls.append(
            AttentionCall(
                layer_index=int(getattr(module, "layer_idx", -1)),
                num_q_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                k_dim=key.shape[-1],
                v_dim=value.shape[-1],
                window=kwargs.get("sliding_window"),
                is_causal=bool(kwargs.get("is_causal", getattr(module, "is_causal", True))),
                mask=mask,
                keywords=frozenset(name for name, given in kwargs.items() if given is not None),
            )
        )
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=kwargs.get("scaling"), enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What the cache and the attention must be like for this model."""

    cache_layers: dict[int, int]  # the model's layer index -> place in the cache
    windows: dict[int, int | None]  # by the model's layer index
    num_kv_heads: dict[int, int]  # by the model's layer index
    head_dim: int  # the most of any layer's K and V


def check_config(config: Any, max_model_len: int | None) -> int:
    """Refuse by configuration what the probe's forward pass can't show. Raises `ModelRefused`.

    Returns the length to serve: the one asked for, else the model's own.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(f"{name}: encoder-decoder models are not supported; use a decoder-only model")
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    length = max_model_len or limit or _DEFAULT_MODEL_LEN
    kinds = set(getattr(config, "layer_types", None) or ()) | set(getattr(config, "layers_block_type", None) or ())
    if "chunked_attention" in kinds:
        chunk = getattr(config, "attention_chunk_size", 0) or 0
        if length > chunk or getattr(config, "attn_temperature_tuning", False):
            raise ModelRefused(
                f"{name}: chunked attention / position-dependent query scaling; lower --max-model-len to <= {chunk} "
                "(and attn_temperature_tuning must be off)"
            )
        kinds.discard("chunked_attention")
    if unknown := sorted(kinds - _KNOWN_LAYER_TYPES):
        raise ModelRefused(
            f"{name}: layers of kind {', '.join(unknown)} keep recurrent or convolution state, or use attention of "
            "another form; only models of full and sliding-window attention are supported"
        )
    _check_rope(config, length, limit)
    if limit is not None and length > limit:
        raise ModelRefused(f"{name}: --max-model-len {length} is more than the model's {limit}")
    return int(length)


def _check_rope(config: Any, length: int, limit: int | None) -> None:
    """Refuse positions past the point where the rotation depends on what else is in the batch."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = parameters.get("rope_type", "default")
        original = parameters.get("original_max_position_embeddings") if kind == "longrope" else limit
        if kind in ("dynamic", "longrope") and (original is None or length > original):
            raise ModelRefused(
                f"{config.model_type}: rope type {kind} depends on the longest sequence in the batch; "
                f"set --max-model-len <= {original}"
            )


def plan_attention(config: Any, calls: list[AttentionCall], max_model_len: int) -> AttentionPlan:
    """Turn the probe's notes into a plan that holds for sequences of up to `max_model_len` tokens.
    Raises `ModelRefused` with the reason.
    """
    name = config.model_type
    if not calls:
        raise ModelRefused(f"{name}: model code does not use the attention interface; not supported")
    by_layer: dict[int, list[AttentionCall]] = {}
    for call in calls:
        by_layer.setdefault(call.layer_index, []).append(call)
    if -1 in by_layer:
        raise ModelRefused(f"{name}: attention modules carry no layer_idx; not supported")
    repeated = next((len(group) for group in by_layer.values() if len(group) > 1), None)
    if repeated is not None:
        raise ModelRefused(f"{name}: calls attention {repeated} times per layer; not supported")
    num_layers = int(config.num_hidden_layers)
    if len(by_layer) < num_layers:
        missing = sorted(set(range(num_layers)) - set(by_layer))
        raise ModelRefused(
            f"{name}: layers {missing} keep recurrent/conv state or bypass attention; "
            "only pure attention models are supported"
        )
    windows = {}
    for index, (call,) in ((index, tuple(group)) for index, group in by_layer.items()):
        if unknown := sorted(call.keywords - _READ - _HARMLESS):
            raise ModelRefused(f"{name}: attention argument {unknown[0]} is not supported")
        windows[index] = _window(name, call, max_model_len)
    return AttentionPlan(
        cache_layers={index: place for place, index in enumerate(sorted(by_layer))},
        windows=windows,
        num_kv_heads={call.layer_index: call.num_kv_heads for call in calls},
        head_dim=max(max(call.k_dim, call.v_dim) for call in calls),
    )


def _window(name: str, call: AttentionCall, max_model_len: int) -> int | None:
    """The layer's sliding window, by its keyword or by its mask, which must agree. `None`: sees everything."""
    if call.mask is None and not call.is_causal:
        raise ModelRefused(f"{name}: layer {call.layer_index} lets tokens see what comes after them; not supported")
    window = call.window
    if call.mask is not None:
        if not isinstance(call.mask, MaskRecord) or not hasattr(call.mask, "mask_function"):
            raise ModelRefused(f"{name}: layer {call.layer_index} builds a mask of its own; not supported")
        window = window if window is not None else call.mask.local_size
        reach = window if window is not None else 64
        for query in (0, 1, reach - 1, reach, reach + 1, 4 * reach + 3, max_model_len - 1):
            for key in (0, query - reach - 1, query - reach, query - reach + 1, query - 1, query, query + 1):
                if not 0 <= query < max_model_len or key < 0:
                    continue
                visible = key <= query and (window is None or key > query - window)
                if bool(call.mask.mask_function(0, 0, torch.tensor(query), torch.tensor(key))) != visible:
                    raise ModelRefused(
                        f"{name}: layer {call.layer_index} uses a mask other than causal or sliding window"
                    )
    return window if window is not None and window < max_model_len else None
