"""How transformers' attention layers reach the engine: one function, registered under a name of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from choreo_agents.attention.step import Attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "choreo_segments"
"""The name under which transformers finds the hook."""

_current = threading.local()


@contextmanager
def attending(step: Attention) -> Iterator[None]:
    """Let the attention layers that run in this thread attend as a step says.

    Not a keyword of the model's forward: some families keep those from their attention layers.
    """
    _current.step = step
    try:
        yield
    finally:
        del _current.step


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, over one packed row of tokens.

    Args:
        module: The model's attention layer, which knows its index.
        query: [1, heads, tokens, head_dim], already rotated; `key` and `value` [1, kv_heads, tokens, head_dim].
        scaling: Factor on the scores; None: one over the root of head_dim.
        s_aux: [heads], attention sinks.

    Returns:
        [1, tokens, heads, head_dim], and no weights.
    """
    assert attention_mask is None and isinstance(module.layer_idx, int)
    step: Attention = _current.step
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = step.attend(module.layer_idx, query[0].transpose(0, 1), key[0], value[0], scale, s_aux)
    return out[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """The layout says who sees what; no mask is built."""


def route(model: PreTrainedModel) -> None:
    """Let a model's attention layers call the engine's attention.

    No mask function goes with it: transformers then makes no mask, and does not look for packed sequences among the
    positions, for which a GPU would have to be waited for.
    """
    from transformers import AttentionInterface  # noqa: PLC0415 - loading the model has

    AttentionInterface.register(IMPLEMENTATION, segment_attention)
    model.set_attn_implementation(IMPLEMENTATION)
