"""What one engine is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one engine. Sizes are tokens unless the name says otherwise."""

    model: Path  # a folder in Hugging Face form
    dtype: str = "auto"  # auto, bfloat16, float16 or float32
    block_size: int = 16
    kv_cache_gb: float = 0.5
    max_model_len: int | None = None  # None: the model's own limit
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    num_threads: int | None = None  # None: all cores that the process may use
    num_blocks: int | None = None  # overrides kv_cache_gb
    poison_freed_blocks: bool = False  # fill freed blocks with NaN: a test's proof that nobody reads them
