"""Our attention as transformers' model code calls it: write the step's K and V, attend, return.

transformers looks attention up by name in its `AttentionInterface`; the function found there hands
the call to the object that the module carries, so that two engines in one process don't meet.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.context import AttentionBackend, AttentionContext, LayerArguments
from engine.kv_cache import KvCache
from engine.probe import AttentionPlan


class PagedAttention:
    """The attention of one engine's model. `context` is set before each forward pass."""

    def __init__(self, cache: KvCache, backend: AttentionBackend, plan: AttentionPlan) -> None:
        self.context: AttentionContext | None = None
        self._backend = backend
        self._plan = plan
        self._head_dim = cache.shape.head_dim
        self._layers = {
            index: cache.layer(place, plan.num_kv_heads[index]) for index, place in plan.cache_layers.items()
        }

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, num_q_heads, num_tokens, k_dim]
        key: torch.Tensor,  # [1, num_kv_heads, num_tokens, k_dim]
        value: torch.Tensor,  # [1, num_kv_heads, num_tokens, v_dim]
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Returns `[1, num_tokens, num_q_heads, v_dim]` and no weights."""
        assert self.context is not None and mask is None
        layer_index: int = module.layer_idx  # type: ignore[assignment]
        layer = self._layers[layer_index]
        layer.write(
            self.context.slot_blocks,
            self.context.slot_offsets,
            _padded(key[0].transpose(0, 1), self._head_dim),
            _padded(value[0].transpose(0, 1), self._head_dim),
        )
        scaling = kwargs.get("scaling")
        arguments = LayerArguments(
            scaling=scaling if scaling is not None else key.shape[-1] ** -0.5,
            sliding_window=self._plan.windows[layer_index],
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
        )
        packed = _padded(query[0].transpose(0, 1), self._head_dim)
        output = self._backend.attend(packed, layer, self.context, arguments)
        return output[None, ..., : value.shape[-1]], None


def _padded(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    missing = head_dim - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
