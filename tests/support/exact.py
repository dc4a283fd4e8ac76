"""Plain Hugging Face models in double precision: a reference whose rounding cannot be mistaken for the engine's.

In single precision it can: which kernels a machine's instructions choose has put the logits of tiny models 1.3e-4 away
from those of the same forward in doubles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

TOLERANCE = 1e-4
"""How far logits in single precision may be from these."""
Model = TypeVar("Model", bound=torch.nn.Module)


def plain_model(path: Path | str) -> PreTrainedModel:
    """The checkpoint without anything of ours, in fp32."""
    return AutoModelForCausalLM.from_pretrained(
        path,
        attn_implementation="eager",
        experts_implementation="eager",  # the others have no kernels for doubles
        dtype=torch.float32,
    ).eval()


def doubled(model: Model) -> Model:
    """The model with all its weights in fp64, to be called within `exactly()`.

    The angles of its rotations stay fp32, as Hugging Face has them in any precision: they are the model's definition.
    At position 300 they are rounded by up to 1.5e-5 radians, which moves logits more than all else that is rounded.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model


@contextmanager
def exactly() -> Iterator[None]:
    """Within it, or within what it decorates, doubled models compute everything but their angles in doubles."""
    with torch.inference_mode(), _DoublesStayDoubles():
        yield


class _DoublesStayDoubles(TorchFunctionMode):
    """What is computed from doubles is not rounded on the way, whatever precision is asked for.

    Hugging Face's norms, softmaxes and routers ask for fp32 by name: without this, they make a third of the error of
    a forward in fp32 (1.5e-5 of 4.1e-5, the worst of the families in the tests).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            func = Tensor.double if func is Tensor.float else func
            args = tuple(map(_widened, args))
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
