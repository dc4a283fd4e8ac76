"""Gradient checkpointing of a model in eval mode: its layers are computed again on the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

Again = Callable[[], AbstractContextManager[None]]
"""Enters what the layers were computed in."""


@contextmanager
def checkpointing(model: PreTrainedModel, again: Again, *, random: bool = False) -> Iterator[None]:
    """Keep, of the forward passes in the block, only what goes into each layer.

    Transformers' own switch works in train mode only, which would also turn dropouts on.

    Args:
        model: Whose layers.
        again: What a layer is computed again in: on the thread that goes back, after the block has ended.
        random: Whether the layers draw random numbers: they draw the same again.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        once: Any = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=random,
            context_fn=lambda: (nullcontext(), _Repeated(again)),
        )
        object.__setattr__(layer, "forward", once)
    try:
        yield
    finally:
        for layer in layers:
            object.__delattr__(layer, "forward")


class _Repeated(AbstractContextManager[None]):
    """Enters anew each time: a graph that is kept goes back more than once."""

    def __init__(self, again: Again) -> None:
        self._again = again

    def __enter__(self) -> None:
        self._entered = self._again()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)
