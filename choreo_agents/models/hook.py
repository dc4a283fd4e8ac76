"""Routes the attention layers of transformers to the engine, through one registered attention function."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
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
def pass_context(attention: Attention, adapted: Sequence[Any] = ()) -> Iterator[None]:
    """Set what the forward passes of this thread attend to, and the adapters of their tokens, at most one of each.

    It is no keyword of the model's forward, as some families do not pass keywords on to their attention layers.
    """
    _current.attention, _current.adapted = attention, adapted
    try:
        yield
    finally:
        del _current.attention, _current.adapted


def is_attending() -> bool:
    """Return whether a forward pass of this thread has its attention."""
    return hasattr(_current, "attention")


def current_adapters() -> Sequence[Any]:
    """Return the adapters of this thread's forward pass."""
    adapted: Sequence[Any] = getattr(_current, "adapted", ())
    return adapted


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
    """Attend over one packed row of tokens, with the interface of transformers.

    Args:
        module: The model's attention layer, which has a `layer_idx`.
        query: [1, heads, tokens, head_dim], already rotated; `key` and `value` [1, kv_heads, tokens, head_dim].
        scaling: Factor on the scores; None: one over the root of head_dim.
        s_aux: [heads], attention sinks.

    Returns:
        [1, tokens, heads, head_dim], and no weights.
    """
    assert attention_mask is None and isinstance(module.layer_idx, int)
    step: Attention = _current.attention
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = step.attend(module.layer_idx, query[0].transpose(0, 1), key[0], value[0], scale, s_aux)
    return out[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """Build no mask: the step's layout holds the visibility."""


def route(model: PreTrainedModel) -> None:
    """Let a model's attention layers call the engine's attention.

    No mask function is registered with it: transformers then builds no mask, and does not search the positions for
    packed sequences, which would synchronise with the GPU.
    """
    from transformers import AttentionInterface  # noqa: PLC0415 - loading the model has

    AttentionInterface.register(IMPLEMENTATION, segment_attention)
    model.set_attn_implementation(IMPLEMENTATION)
