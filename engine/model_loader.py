"""Loads a model with transformers and puts our attention into it. The one door to transformers.

The model's code is transformers' own; there is no models folder here. What makes a model ours is
the attention function, registered under a name in transformers' `AttentionInterface`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.probe import NUM_PROBE_TOKENS, AttentionPlan, ProbeAttention, check_config, plan_attention, record_mask

_PAGED = "pdserve"  # no mask function is registered for it: transformers then builds no mask
_PROBE = "pdserve_probe"
REFERENCE = "sdpa"
_NOT_IDENTITY = frozenset({"dtype", "transformers_version", "_name_or_path", "_model_name_or_path"})

AttentionCallable = Callable[..., tuple[torch.Tensor, None]]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The function that the KV belongs to, as digests that are stable across machines."""

    base_model: str
    tokenizer: str
    position_encoding: str
    weights: str  # shown, not compared


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, probed, with our attention selected but not yet attached."""

    model: Any  # a transformers PreTrainedModel
    plan: AttentionPlan
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    identity: ModelIdentity


def load_model(config: EngineConfig) -> LoadedModel:
    """Load, probe, and select our attention. Raises `ModelRefused` for what would be served wrongly."""
    AttentionInterface.register(_PAGED, _call_attached)
    AttentionInterface.register(_PROBE, _call_attached)
    AttentionMaskInterface.register(_PROBE, record_mask)
    transformers_logging.disable_progress_bar()
    hf_config = AutoConfig.from_pretrained(config.model)
    text_config = hf_config.get_text_config()
    max_model_len = _max_model_len(config, text_config)
    check_config(text_config, max_model_len)
    dtype = pick_dtype(config.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype, attn_implementation=_PROBE)
    except (KeyError, ValueError) as error:
        raise ModelRefused(
            f"{hf_config.model_type}: model code does not use the attention interface; not supported ({error})"
        ) from error
    model.eval()
    _share_pages(model, config.model, dtype)
    plan = _probe(model, text_config)
    model.set_attn_implementation(_PAGED)
    return LoadedModel(
        model=model,
        plan=plan,
        dtype=dtype,
        max_model_len=max_model_len,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        eos_token_ids=_eos_token_ids(config.model, text_config),
        identity=_identity(config.model, text_config),
    )


def attach(loaded: LoadedModel, attention: AttentionCallable) -> None:
    """Make every attention module of the model call `attention`."""
    for module in loaded.model.modules():
        module.pdserve_attention = attention


def use_reference_attention(loaded: LoadedModel, is_reference: bool) -> None:
    """Switch between transformers' own attention and ours: for the self-test at load."""
    loaded.model.set_attn_implementation(REFERENCE if is_reference else _PAGED)


def pick_dtype(name: str) -> torch.dtype:
    """The dtype by name; `auto` is bfloat16 where the processor multiplies it, else float32."""
    if name == "auto":
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if torch.cuda.is_available() or has_bf16 else torch.float32
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ModelRefused(f"--dtype {name} is not one of auto, {', '.join(dtypes)}")
    return dtypes[name]


def _call_attached(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    attention: AttentionCallable = module.pdserve_attention
    return attention(module, query, key, value, attention_mask, **kwargs)


def _probe(model: Any, text_config: Any) -> AttentionPlan:
    probe = ProbeAttention()
    for module in model.modules():
        module.pdserve_attention = probe
    token_ids = torch.full((1, NUM_PROBE_TOKENS), 5)
    positions = torch.arange(NUM_PROBE_TOKENS)[None]
    try:
        with torch.inference_mode():
            model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=torch.tensor([0]))
    except (TypeError, AttributeError, KeyError, RuntimeError, IndexError) as error:
        raise ModelRefused(
            f"{text_config.model_type}: the model's code does not run with our attention: {error}"
        ) from error
    return plan_attention(text_config, probe.calls)


def _max_model_len(config: EngineConfig, text_config: Any) -> int:
    limit = getattr(text_config, "max_position_embeddings", None) or getattr(text_config, "n_positions", None)
    if config.max_model_len is None:
        return int(limit or 2048)
    if limit is not None and config.max_model_len > limit:
        raise ModelRefused(f"--max-model-len {config.max_model_len} is more than the model's {limit}")
    return config.max_model_len


def _share_pages(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Let parameters be views of the mapped file where they are stored just as they are used, so that
    all workers of a machine share one copy in the page cache.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        return
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise ModelRefused(f"{path}: not a readable safetensors file: {error}") from error
    for name, parameter in model.named_parameters():
        tensor = stored.get(name)
        if tensor is not None and tensor.dtype == dtype == parameter.dtype and tensor.shape == parameter.shape:
            parameter.data = tensor


def _eos_token_ids(folder: Path, text_config: Any) -> frozenset[int]:
    found: list[Any] = [text_config.eos_token_id]
    if (folder / "generation_config.json").is_file():
        found.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    ids: set[int] = set()
    for value in found:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def _identity(folder: Path, text_config: Any) -> ModelIdentity:
    config = {key: value for key, value in text_config.to_dict().items() if key not in _NOT_IDENTITY}
    rope = getattr(text_config, "rope_parameters", None), getattr(text_config, "max_position_embeddings", None)
    tokenizer = folder / "tokenizer.json"
    weights = [f"{path.name}:{path.stat().st_size}" for path in sorted(folder.glob("*.safetensors"))]
    return ModelIdentity(
        base_model=f"{text_config.model_type}-{_digest(_json(config))}",
        tokenizer=_digest(tokenizer.read_bytes()) if tokenizer.is_file() else "none",
        position_encoding=_digest(_json(rope)),
        weights=_digest(_json(weights)),
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
