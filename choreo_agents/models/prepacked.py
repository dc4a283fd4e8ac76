"""Linear layers whose weights oneDNN has laid out beforehand: about twice as fast on a CPU, at twice their memory.

The two operators are torch's own but private. They are looked for, and compared with the plain product, at load.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

SMALLEST = 1 << 17
"""Weights of a matrix below which a plain product is as fast."""
_USUAL_ROWS = 8
"""What the layout is chosen for; it serves any number."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference from the plain product, as a share of its largest value."""


class Packed:
    """A layer's weights, laid out; good for as long as they are the layer's."""

    def __init__(self, layer: nn.Linear) -> None:
        weight = layer.weight
        self._weight = weight
        self._seen = (weight._version, weight.data_ptr(), weight.dtype, weight.device)
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _USUAL_ROWS)

    def serves(self, layer: nn.Linear, x: Tensor) -> bool:
        """Whether the layer still has these weights, and nothing but a product of this dtype is asked of them."""
        weight, bias = layer.weight, layer.bias
        if weight is not self._weight or x.dtype != weight.dtype or torch.is_autocast_enabled("cpu"):
            return False
        if self._seen != (weight._version, weight.data_ptr(), weight.dtype, weight.device):
            return False
        learns = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        return not (learns and torch.is_grad_enabled())

    def multiply(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, layer.bias, "none", [], "")
        return product


_packed: WeakKeyDictionary[nn.Linear, Packed] = WeakKeyDictionary()
"""Beside the layers, not in them: copies, pickles and checkpoints of a model know nothing of it."""


class PrepackedLinear(nn.Linear):
    """A linear layer that looks for its laid-out weights; a copy of it has none, and is a plain layer."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the layer's own name
        packed = _packed.get(self)
        if packed is None or not packed.serves(self, input):
            return functional.linear(input, self.weight, self.bias)
        return packed.multiply(self, input)


def prepack(model: nn.Module) -> int:
    """Lay out the weights of a model's large linear layers, where that can be done and is right.

    Returns:
        How many layers.
    """
    if not _available():
        return 0
    right: dict[tuple[torch.Size, torch.dtype, bool], bool] = {}
    count = 0
    with torch.inference_mode(False), torch.no_grad():
        for layer in model.modules():
            if not isinstance(layer, nn.Linear) or type(layer) not in (nn.Linear, PrepackedLinear):
                continue
            if not _large_on_cpu(layer.weight):
                continue
            shape = (layer.weight.shape, layer.weight.dtype, layer.bias is None)
            made = _made(layer, known=right.get(shape))
            right[shape] = made is not None
            if made is not None:
                layer.__class__ = PrepackedLinear
                _packed[layer] = made
                count += 1
    return count


def _available() -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise")
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and all(hasattr(torch.ops.mkldnn, name) for name in names)


def _large_on_cpu(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in _TOLERANCE and weight.numel() >= SMALLEST


def _made(layer: nn.Linear, *, known: bool | None) -> Packed | None:
    """The layer's weights laid out; None if this processor cannot, or gives something else.

    Args:
        layer: Whose weights.
        known: Whether that is right for layers of its shape; None: it is tried, with few and with many rows.
    """
    if known is False:
        return None
    try:
        made = Packed(layer)
        generator = torch.Generator().manual_seed(0)
        for rows in (1, 3, 33) if known is None else ():
            x = torch.randn(1, rows, layer.in_features, generator=generator).to(layer.weight.dtype)
            wanted = functional.linear(x, layer.weight, layer.bias).float()
            error = (made.multiply(layer, x).float() - wanted).abs().max()
            if not error <= _TOLERANCE[layer.weight.dtype] * wanted.abs().max():
                return None
    except (RuntimeError, NotImplementedError):
        return None
    return made
