"""The fused forward pass: four matrix products per layer, with Triton kernels between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from choreo_agents.attention.kind import AttentionKind, HeadShape
from choreo_agents.attention.step import Attention, StepAttention
from choreo_agents.models.lean.made_of import ModelSnapshot
from choreo_agents.models.lean.shape import Angles, LeanLayer, LeanShape, joined_bias

_GATED_TOGETHER = 1024
"""Numbers per program of the gate kernel."""
_TURNED_NUMBERS = 1024
"""Numbers per program of the rotation kernel, in whole heads."""


class FusedForward:
    """A forward pass of a Llama-like model on a GPU, with any attention backend.

    Args:
        model: The model; weights of layers with the same input become views of one tensor.
        shape: Its modules.
        heads: Shape of the heads of all its layers.
    """

    def __init__(self, model: nn.Module, shape: LeanShape, heads: HeadShape) -> None:
        self._shape, self._heads = shape, heads
        self._products = [
            {name: _join_linears(modules) for name, modules in layer.products.items()} for layer in shape.layers
        ]
        self.made_of = ModelSnapshot(model)

    def serves(self, attention: Attention) -> TypeGuard[StepAttention]:
        """Return whether it can run a step with this attention."""
        return isinstance(attention, StepAttention)

    def logits(self, tokens: Tensor, positions: Tensor, attention: StepAttention, indices: Tensor) -> Tensor:
        """Return logits, see `ModelAdapter.traced_logits`."""
        heads, dim = self._heads, self._heads.head_dim
        turned = (heads.heads + heads.kv_heads) * dim
        x = functional.embedding(tokens, self._shape.embedding.weight)
        wide = self._shape.norm.new_empty(0, dtype=torch.float32)
        angles = self._shape.angles(wide, positions, attention.kinds)
        added: Tensor | None = None
        for number, (layer, products) in enumerate(zip(self._shape.layers, self._products, strict=True)):
            norm, inner_norm = layer.norms
            qkv = products["qkv"](_normalise(x, added, norm, layer.eps[0]))
            query, key = _rotate(qkv, layer, heads, attention.kinds[number], angles)
            value = qkv[:, turned:].view(-1, heads.kv_heads, dim).transpose(0, 1)
            attended = attention.attend(number, query, key.transpose(0, 1), value, layer.scale)
            added = products["o"](attended.reshape(len(x), -1))
            gate_up = products["gate_up"](_normalise(x, added, inner_norm, layer.eps[0]))
            added = products["down"](_gate(gate_up))
        assert added is not None
        last = _normalise(x[indices], added[indices], self._shape.norm, self._shape.eps)
        logits: Tensor = self._shape.head(last)
        return logits


def _next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _normalise(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add a block's output to [rows, width] in place, and return the sum normalised."""
    from choreo_agents.models.fused.kernels import norm_kernel  # noqa: PLC0415 - an extra

    rows, width = x.shape
    out, padded = torch.empty_like(x), _next_power(width)
    warps = min(16, max(4, padded // 512))
    norm_kernel[(rows,)](
        x, x if added is None else added, weight, out, width, eps, ADDS=added is not None, WIDTH=padded, num_warps=warps
    )
    return out


def _rotate(
    qkv: Tensor, layer: LeanLayer, heads: HeadShape, kind: AttentionKind, angles: Angles
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys to their positions: [tokens, heads, head_dim] and [tokens, kv_heads, head_dim]."""
    from choreo_agents.models.fused.kernels import turn_kernel  # noqa: PLC0415 - an extra

    count, dim = heads.heads + heads.kv_heads, heads.head_dim
    rotation, norms = kind.rotation, layer.head_norms
    if rotation is None and not norms:
        out = qkv[:, : count * dim].view(len(qkv), count, dim)
        return out[:, : heads.heads], out[:, heads.heads :]
    out = qkv.new_empty(len(qkv), count, dim)
    cos, sin = (qkv, qkv) if rotation is None else angles[rotation]
    together = max(1, _TURNED_NUMBERS // _next_power(dim))
    turn_kernel[(len(qkv), -(-count // together))](
        qkv,
        cos,
        sin,
        *(norms or (qkv, qkv)),
        out,
        qkv.shape[1],
        layer.eps[1],
        QUERIES=heads.heads,
        TURNED=count,
        DIM=dim,
        WIDTH=_next_power(dim),
        HALF=0 if rotation is None else rotation.dimensions // 2,
        TURNED_FROM=0 if rotation is None else rotation.first,
        NEIGHBOURS=rotation is not None and rotation.pairing == "neighbours",
        NORMS=bool(norms),
        HEADS=together,
    )
    return out[:, : heads.heads], out[:, heads.heads :]


def _gate(gate_up: Tensor) -> Tensor:
    from choreo_agents.models.fused.kernels import gate_kernel  # noqa: PLC0415 - an extra

    rows, inner = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    gate_kernel[(rows, -(-inner // _GATED_TOGETHER))](gate_up, out, inner, TOGETHER=_GATED_TOGETHER)
    return out


def _join_linears(modules: Sequence[nn.Linear]) -> Callable[[Tensor], Tensor]:
    """Join linear layers with the same input; their weights become views of one tensor."""
    weight, at = modules[0].weight.detach(), 0
    if len(modules) > 1:
        weight = torch.cat([module.weight.detach() for module in modules])
        for module in modules:
            module.weight.data = weight[at : at + module.out_features]
            at += module.out_features
    return partial(functional.linear, weight=weight, bias=joined_bias(modules, weight.dtype))
