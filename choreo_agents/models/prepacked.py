"""Linear layers whose weights oneDNN has laid out beforehand: about twice as fast on a CPU, at twice their memory.

The two operators are torch's own but private. They are looked for, and compared with the plain product, at load.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

SMALLEST = 1 << 17
"""Weights of a matrix below which a plain product is as fast."""
_USUAL_ROWS = 8
"""What the layout is chosen for; it serves any number."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference from the plain product, as a share of its largest value."""


class PrepackedLinear:
    """Stands in for the forward of a linear layer, as long as its weights are the ones that were laid out."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._weight = layer.weight
        self._version = layer.weight._version
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _USUAL_ROWS)

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the layer's own name
        x = input
        weight, bias = self._layer.weight, self._layer.bias
        trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        if trained or weight is not self._weight or weight._version != self._version or x.dtype != weight.dtype:
            return functional.linear(x, weight, bias)
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._layer.bias, "none", [], "")
        return product


def prepack(model: nn.Module) -> int:
    """Lay out the weights of a model's large linear layers, where that can be done and is right.

    Returns:
        How many layers.
    """
    if not _available():
        return 0
    right: dict[tuple[torch.Size, torch.dtype, bool], bool] = {}
    packed = 0
    with torch.inference_mode(False), torch.no_grad():
        for layer in model.modules():
            if type(layer) is not nn.Linear or not _large_on_cpu(layer.weight):
                continue
            made = PrepackedLinear(layer)
            shape = (layer.weight.shape, layer.weight.dtype, layer.bias is None)
            if shape not in right:
                right[shape] = _is_right(layer, made)
            if right[shape]:
                layer.forward = made  # type: ignore[method-assign]
                packed += 1
    return packed


def _available() -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise")
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and all(hasattr(torch.ops.mkldnn, name) for name in names)


def _large_on_cpu(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in _TOLERANCE and weight.numel() >= SMALLEST


def _is_right(layer: nn.Linear, made: PrepackedLinear) -> bool:
    """Whether it gives what the layer gives, for few and for many rows."""
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 3, 33):
        x = torch.randn(1, rows, layer.in_features, generator=generator).to(layer.weight.dtype)
        wanted = functional.linear(x, layer.weight, layer.bias).float()
        try:
            error = (made.multiply(x).float() - wanted).abs().max()
        except RuntimeError:
            return False
        if not error <= _TOLERANCE[layer.weight.dtype] * wanted.abs().max():
            return False
    return True
