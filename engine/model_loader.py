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
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.probe import NUM_PROBE_TOKENS, AttentionPlan, ProbeAttention, check_config, plan_attention, record_mask

_PAGED = "pdserve"  # no mask function is registered for it: transformers then builds no mask
_PROBE = "pdserve_probe"
_REFERENCE = "eager"  # the one that every architecture has
_NOT_IDENTITY = frozenset({"dtype", "transformers_version", "_name_or_path", "_model_name_or_path"})
_NUM_SAMPLES, _SAMPLE_NBYTES = 64, 4096

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
    """Load, probe, and select our attention. Raises `ModelRefused` for what would be served wrongly.

    Weights that are stored in `dtype` stay pages of the mapped file, which all processes share.
    """
    AttentionInterface.register(_PAGED, _call_attached)
    AttentionInterface.register(_PROBE, _call_attached)
    AttentionMaskInterface.register(_PROBE, record_mask)
    transformers_logging.disable_progress_bar()
    dtype = pick_dtype(config.dtype)
    try:
        hf_config = AutoConfig.from_pretrained(config.model)
    except (OSError, ValueError, KeyError) as error:
        raise ModelRefused(f"{config.model}: no model configuration that transformers knows: {error}") from error
    text_config = hf_config.get_text_config()
    max_model_len = check_config(text_config, config.max_model_len)
    model = _from_pretrained(config.model, dtype, hf_config)
    plan = _probe(model, text_config, max_model_len)
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
    loaded.model.set_attn_implementation(_REFERENCE if is_reference else _PAGED)


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


def _from_pretrained(folder: Path, dtype: torch.dtype, hf_config: Any) -> Any:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=hf_config, dtype=dtype, attn_implementation=_PROBE, output_loading_info=True
        )
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ModelRefused(f"{folder}: weights that can't be loaded: {error}") from error
    except (KeyError, ValueError) as error:
        raise ModelRefused(
            f"{hf_config.model_type}: model code does not use the attention interface; not supported ({error})"
        ) from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):  # transformers would leave these random
        raise ModelRefused(f"{folder}: the checkpoint has no {missing[0]} ({len(missing)} weights are missing)")
    return model.eval()


def _probe(model: Any, text_config: Any, max_model_len: int) -> AttentionPlan:
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
    return plan_attention(text_config, probe.calls, max_model_len)


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
    weights = [_sample(path) for path in sorted(folder.glob("*.safetensors"))]
    return ModelIdentity(
        base_model=f"{text_config.model_type}-{_digest(_json(config))}",
        tokenizer=_digest(tokenizer.read_bytes()) if tokenizer.is_file() else "none",
        position_encoding=_digest(_json(rope)),
        weights=_digest(_json(weights)),
    )


def _sample(path: Path) -> str:
    """A digest of a file's size, its header and some of its pages: enough to tell a fine-tune from another."""
    size = path.stat().st_size
    with path.open("rb") as file:
        parts = [str(size).encode()]
        for place in range(_NUM_SAMPLES):
            file.seek(size * place // _NUM_SAMPLES)
            parts.append(file.read(_SAMPLE_NBYTES))
    return _digest(b"".join(parts))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
