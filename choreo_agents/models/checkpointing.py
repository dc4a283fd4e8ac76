"""Gradient checkpointing for a model in eval mode: layers are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from choreo_agents.models.hook import is_attending

Again = Callable[[], AbstractContextManager[None]]
"""Makes the context managers that layers are recomputed in, like that of the forward pass."""


@contextmanager
def checkpointing(model: PreTrainedModel, again: Again, *, random: bool = False) -> Iterator[None]:
    """Keep only the inputs of each layer in the forward passes of the block.

    The switch of transformers works in train mode only, which would also turn dropout on.

    Args:
        model: The model whose layers are checkpointed.
        again: Context in which a layer is recomputed, on the backward thread, after the block has ended.
        random: Whether layers draw random numbers; if so, they draw the same ones again.
    """

    def run(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with nullcontext() if is_attending() else again():
            return forward(*args, **options)

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        forward = partial(checkpoint, run, layer.forward, use_reentrant=False, preserve_rng_state=random)
        # An instance attribute that shadows the method, past the bookkeeping of `nn.Module`.
        object.__setattr__(layer, "forward", forward)
    try:
        yield
    finally:
        for layer in layers:
            object.__delattr__(layer, "forward")
