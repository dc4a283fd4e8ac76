"""Routes a Hugging Face model's attention to the engine's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from choreo_agents.attention.step import StepAttention

IMPLEMENTATION = "choreo_segments"
"""The name under which transformers finds the hook."""


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    step_attention: StepAttention,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, over one packed row of tokens.

    Args:
        module: The model's attention layer, which knows its index.
        query: [1, heads, tokens, head_dim], already rotated; `key` and `value` [1, kv_heads, tokens, head_dim].
        scaling: Factor on the scores.
        step_attention: The step, passed through the model's forward.

    Returns:
        [1, tokens, heads, head_dim], and no weights.
    """
    assert attention_mask is None and isinstance(module.layer_idx, int)
    out = step_attention.attend(module.layer_idx, query[0].transpose(0, 1), key[0], value[0], scaling)
    return out[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """The layout says who sees what; no mask is built."""


AttentionInterface.register(IMPLEMENTATION, segment_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
