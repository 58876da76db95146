"""Tiny random models of many architectures, saved to disk as a checkpoint is: what the probe must accept or refuse.

Untied, with a large initialisation and with norms, biases and sinks that are not all one or zero: a model that is
nearly the identity would pass with any attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

VOCAB_SIZE = 160
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_ssm": 128}

# What the engine must serve as transformers' eager attention does.
SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "phi3": {"sliding_window": WINDOW},
    "gpt2": {**_GPT2, "scale_attn_by_inverse_layer_idx": True},
    "gpt_oss": {**_EXPERTS, "head_dim": 16, "sliding_window": WINDOW},
    "mixtral": _EXPERTS,
    "olmo2": {},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 2,
    },
    "stablelm": {},
    "phimoe": {**_EXPERTS, "sliding_window": WINDOW},
    "qwen2_moe": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
    },
}

# What it must refuse, what the message must say, and the --max-model-len that it is asked for.
REFUSED: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "mamba2": (
        {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "expand": 2},
        r"mamba2: layers of kind linear_attention keep recurrent or convolution state",
        None,
    ),
    "falcon_h1": (_MAMBA, r"falcon_h1: layers of kind hybrid keep recurrent or convolution state", None),
    "bamba": ({**_MAMBA, "attn_layer_indices": [1]}, r"bamba: layers of kind linear_attention keep recurrent", None),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1}, r"jamba: layers of kind .*mamba keep recurrent", None),
    "diffllama": ({}, r"diffllama: calls attention 2 times per layer; not supported", None),
    "doge": ({}, r"doge: layer 0 builds a mask of its own; not supported", None),
    "llama4_text": (
        {**_EXPERTS, "head_dim": 16, "attention_chunk_size": 32, "intermediate_size_mlp": 96},
        r"llama4_text: chunked attention .*lower --max-model-len to <= 32",
        None,
    ),
    "xglm": (
        {"d_model": 64, "ffn_dim": 96, "num_layers": 4, "attention_heads": 4},
        r"xglm: model code does not use the attention interface; not supported",
        None,
    ),
    "bloom": (
        {"n_layer": 4, "n_head": 4},
        r"bloom: model code does not use the attention interface; not supported",
        None,
    ),
    "falcon": ({"alibi": True}, r"falcon: model code does not use the attention interface; not supported", None),
    "bert": ({}, r"bert: layer 0 uses a mask other than causal or sliding window", None),
    "dynamic rope": (
        {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}},
        r"llama: rope type dynamic depends on the longest sequence in the batch; set --max-model-len <= 512",
        600,
    ),
    "longrope": (
        {
            "model_type": "phi3",
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 128,
            },
        },
        r"phi3: rope type longrope depends on the longest sequence in the batch; set --max-model-len <= 128",
        None,
    ),
    "t5": (
        {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16},
        r"t5: encoder-decoder models are not supported; use a decoder-only model",
        None,
    ),
    "too long": ({"model_type": "llama"}, r"llama: --max-model-len 513 is more than the model's 512", 513),
}


def save_tiny_model(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    """Make the model, always the same, and write it to `folder` in float32."""
    options = {**_COMMON, **changes}
    model_type = options.pop("model_type", name)
    config = AutoConfig.for_model(model_type, **options)
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.3
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder
