"""Linear layers that prepack their weights for the CPU on first use, which makes them two or three times as fast.

fp32 weights, and bfloat16 ones where torch multiplies no tiles, use a kernel of ours (see `panels`); others, or without
our kernels, use oneDNN through two private operators of torch. Either is checked against the plain product.
Plain weights that are memory-mapped from a file cost no memory, and stay; others are replaced by the prepacked ones.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from choreo_agents.kv.free_memory import free_bytes
from choreo_agents.models.weights.panels import Panels
from choreo_agents.native.library import Kernels, available_kernels, has_tiles

SMALLEST = 1 << 17
"""Weights of the smallest matrix that is prepacked: for smaller ones, a plain product is as fast."""
MOST_OF_FREE = 0.4
"""Share of the free memory that prepacked weights may take: keys and values take half of it, too."""
MOST_BESIDE = 0.5
"""Bytes of prepacked weights beside plain ones, as a share of the model's. A head that is tied to the embedding cannot
replace its weights."""
_USUAL_ROWS = 8
"""Number of rows that oneDNN optimises its layout for; any number works."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference from the plain product, as a share of its largest value."""

Shape = tuple[torch.Size, torch.dtype, bool]
"""Shape and dtype of a layer's weights, and whether it has no bias."""


class Packed:
    """The prepacked weights of a layer, made by its first product, and valid until the layer's weights change.

    Args:
        layer: The layer.
        right: Whether the layout gives right products, by shape; shared by all layers of a model, and filled here.
        replaces: Whether the prepacked weights replace the plain ones.
    """

    def __init__(self, layer: nn.Linear, right: dict[Shape, bool], *, replaces: bool) -> None:
        self._weight = layer.weight
        self._seen = _state(layer.weight)
        self._right, self._replaces = right, replaces
        self._laid_out: Tensor | Panels | None = None
        self._lock = Lock()

    def serves(self, layer: nn.Linear, x: Tensor) -> bool:
        """Return whether it can compute a product: weights unchanged, `x` of their dtype, no gradient needed.

        Lays the weights out, and checks the layout, on first use.
        """
        with self._lock:
            weight, bias = layer.weight, layer.bias
            if weight is not self._weight or x.dtype != weight.dtype or torch.is_autocast_enabled("cpu"):
                return False
            if self._seen != _state(weight):
                return False
            learns = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
            if learns and torch.is_grad_enabled():
                return False
            return self._laid_out is not None or self._lay_out(layer)

    def multiply(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        kernels = _kernels()
        if isinstance(self._laid_out, Panels) and kernels is not None:
            return self._laid_out.multiply(x, layer.bias, kernels)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._laid_out, layer.bias, "none", [], "")
        return product

    def take(self, layer: nn.Linear, panels: Panels) -> None:
        """Use panels that hold the layer's own weights and are known to be right."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._laid_out = panels
            self._replace(layer)

    def _lay_out(self, layer: nn.Linear) -> bool:
        shape = (layer.weight.shape, layer.weight.dtype, layer.bias is None)
        with torch.inference_mode(False), torch.no_grad():
            if self._right.get(shape, True):
                self._laid_out = _make_layout(layer.weight.detach())
            if shape not in self._right:
                self._right[shape] = self._is_right(layer)
            if not self._right[shape]:
                self._laid_out = None
            else:
                self._replace(layer)
        return self._right[shape]

    def _replace(self, layer: nn.Linear) -> None:
        if not self._replaces:
            return
        laid_out = self._laid_out
        assert laid_out is not None
        if isinstance(laid_out, Panels):
            # A stub of the right shape on the meta device: no memory, and any other use of its numbers raises.
            stub = torch.empty(laid_out.outputs, laid_out.inputs, dtype=laid_out.plain_dtype, device="meta")
            weight = nn.Parameter(stub, requires_grad=False)
            weight.choreo_panels = laid_out  # type: ignore[attr-defined]
        else:
            weight = nn.Parameter(laid_out, requires_grad=False)
        self._weight = layer.weight = weight
        self._seen = _state(weight)

    def _is_right(self, layer: nn.Linear) -> bool:
        """Return whether products of few and of many rows equal the plain ones."""
        generator = torch.Generator().manual_seed(0)
        for rows in (1, 3, 33):
            x = torch.randn(1, rows, layer.in_features, generator=generator).to(layer.weight.dtype)
            expected = functional.linear(x, layer.weight, layer.bias)
            # In place: products of an output head take tens of megabytes.
            error = self.multiply(layer, x).sub_(expected).abs_().max()
            if not error <= _TOLERANCE[layer.weight.dtype] * expected.abs_().max():
                return False
        return True


def _make_layout(weight: Tensor) -> Tensor | Panels:
    own, kernels = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and not has_tiles()), _kernels()
    if own and kernels is not None:
        return Panels.of(weight, pairs=kernels.pairs)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _USUAL_ROWS)
    return packed


def _kernels() -> Kernels | None:
    """Return our native kernels, or None."""
    kernels = available_kernels()
    return None if isinstance(kernels, str) else kernels[0]


def is_replaced(weight: Tensor) -> bool:
    """Return whether prepacked weights have replaced a layer's plain ones."""
    return weight.is_mkldnn or getattr(weight, "choreo_panels", None) is not None


def _state(weight: Tensor) -> tuple[Any, ...]:
    place = None if weight.is_mkldnn else weight.data_ptr()
    return weight._version, place, weight.dtype, weight.device


_packed: WeakKeyDictionary[nn.Linear, Packed] = WeakKeyDictionary()
"""Prepacked weights by layer, not in the layers: copies, pickles and checkpoints of a model must not have them."""


class PrepackedLinear(nn.Linear):
    """A linear layer that uses its prepacked weights; a copy of it has none, and is a plain layer."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the layer's own name
        packed = _packed.get(self)
        if packed is not None and packed.serves(self, input):
            return packed.multiply(self, input)
        return functional.linear(input, self.unpack(), self.bias)

    def unpack(self) -> Tensor:
        """Restore the plain weights bit for bit, permanently, if they were replaced; return them."""
        weight = self.weight
        if is_replaced(weight):
            plain = nn.Parameter(plain_weight(weight), requires_grad=weight.requires_grad)
            self.weight = weight = plain
            _packed.pop(self, None)
        return weight

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.unpack()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self.unpack()
        super()._load_from_state_dict(*args, **options)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = destination[f"{prefix}weight"]
        if not keep_vars and (weight.is_meta or weight.is_mkldnn):
            destination[f"{prefix}weight"] = plain_weight(self.weight)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__
        if not is_replaced(self.weight):
            return state
        plain = nn.Parameter(plain_weight(self.weight), requires_grad=self.weight.requires_grad)
        return state | {"_parameters": state["_parameters"] | {"weight": plain}}


def plain_weight(weight: Tensor) -> Tensor:
    """Return the plain weights of a layer, unpacked if they were replaced.

    Raises:
        RuntimeError: The stub that replaced them was written to.
    """
    panels: Panels | None = getattr(weight, "choreo_panels", None)
    with torch.inference_mode(False), torch.no_grad():
        if panels is None:
            return weight.detach().to_dense() if weight.is_mkldnn else weight.detach()
        if weight._version or not weight.is_meta:
            raise RuntimeError(
                "a prepacked weight was written to, but the model does not read it any more: load the model with "
                "prepacked=False to change its weights"
            )
        return panels.plain()


def side_by_side(layers: Sequence[nn.Linear], *, pairs: bool) -> Panels:
    """Lay out layers with the same inputs in shared panels, and let each layer use its part.

    All but the last must have a multiple of `PANEL` outputs; `pairs`: see `Panels.of`.
    """
    with torch.inference_mode(False), torch.no_grad():
        weights = [plain_weight(layer.weight) for layer in layers]
        panels = Panels.of(*weights, pairs=pairs)
        first = 0
        for layer in layers:
            if (packed := _packed.get(layer)) is not None:
                packed.take(layer, panels.part(first, layer.out_features))
            first += layer.out_features
    return panels


def prepack(model: nn.Module, *, replacing: bool = False) -> int:
    """Let a model's large linear layers prepack their weights, where this works and memory allows.

    Args:
        model: The model.
        replacing: Whether to replace plain weights that are neither memory-mapped nor shared.

    Returns:
        Number of layers. Each is prepacked by its first product, which costs about one more step for all together, so
        that a model that is loaded to be inspected or trained costs nothing.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and _can_prepack(layer)]
    replaced, beside = _split_layers(model, layers) if replacing else ([], layers)
    # Layers are replaced one by one: only the largest takes memory twice.
    needed = sum(layer.weight.nbytes for layer in beside) + max((layer.weight.nbytes for layer in replaced), default=0)
    free = free_bytes(torch.device("cpu"))
    if needed > MOST_OF_FREE * free:
        logging.getLogger(__name__).warning(
            "weights are not prepacked for the CPU, which would be faster: it takes %.1f GiB, but only %.1f are free",
            needed / 2**30,
            free / 2**30,
        )
        return 0
    right: dict[Shape, bool] = {}
    for number, layer in enumerate([*replaced, *beside]):
        layer.__class__ = PrepackedLinear
        _packed[layer] = Packed(layer, right, replaces=number < len(replaced))
    return len(replaced) + len(beside)


def _split_layers(model: nn.Module, layers: Sequence[nn.Linear]) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """Return the layers whose plain weights are replaced, and the others that are prepacked beside them."""
    mappings = _file_mappings()
    owners = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    mapped = [layer for layer in layers if _is_within(mappings, layer.weight)]
    unmapped = [layer for layer in layers if not _is_within(mappings, layer.weight)]
    shared = [layer for layer in unmapped if owners[id(layer.weight)] > 1]
    whole = sum(weight.nbytes for weight in model.parameters())
    fits = sum(layer.weight.nbytes for layer in shared) <= MOST_BESIDE * whole
    return [layer for layer in unmapped if layer not in shared], mapped + (shared if fits else [])


def _file_mappings() -> list[tuple[int, int]]:
    """Return the address ranges of memory-mapped files, in order, on Linux; empty elsewhere."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    parts = (line.split(maxsplit=5) for line in lines)
    ranges = (part[0].split("-") for part in parts if part[4] != "0")
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def _is_within(mappings: Sequence[tuple[int, int]], weight: Tensor) -> bool:
    at = bisect_right(mappings, weight.data_ptr(), key=lambda mapping: mapping[0]) - 1
    return at >= 0 and weight.data_ptr() + weight.nbytes <= mappings[at][1]


def _can_prepack(layer: nn.Linear) -> bool:
    weight = layer.weight
    # Subclasses of layers and tensors, and layers with a replaced `forward`, are quantised: they compute products of
    # their own.
    own = type(layer) in (nn.Linear, PrepackedLinear) and "forward" not in vars(layer) and type(weight.data) is Tensor
    plain = own and weight.device.type == "cpu" and not is_replaced(weight) and not weight.is_inference()
    return plain and weight.dtype in _TOLERANCE and weight.numel() >= SMALLEST and _can_lay_out(weight.dtype)


@cache
def _can_lay_out(dtype: torch.dtype) -> bool:
    """Return whether prepacking works with this processor and torch, tried on a small matrix."""
    with torch.inference_mode(False):
        layer = nn.Linear(256, 512, bias=False).to(dtype).requires_grad_(False)
    try:
        return Packed(layer, {}, replaces=False).serves(layer, torch.zeros(1, 256, dtype=dtype))
    except (RuntimeError, AttributeError):
        return False
