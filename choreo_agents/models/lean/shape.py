"""Finds the modules of models that are built like Llama, as the kernel's decoder layer is.

Names and shapes of modules decide how to compute; a comparison with the model's own logits then shows whether that is
right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from choreo_agents.attention.kind import AttentionKind, HeadShape
from choreo_agents.attention.rope import PureRotation
from choreo_agents.native.library import has_tiles, multiply_tiles
from choreo_agents.native.structs import PANEL

_PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_DTYPES = {torch.float32, torch.bfloat16}
Angles = Mapping[PureRotation, tuple[Tensor, Tensor]]
"""Cosines and sines of each token's own position, [tokens, half] in fp32, by rotation."""
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class LeanLayer:
    """The modules of a decoder layer."""

    products: Mapping[str, tuple[nn.Linear, ...]]
    """Linear layers that are computed as one product, by the kernel's name for it."""
    norms: tuple[Tensor, ...]
    """Factors of its norms, which share memory with the model's weights."""
    head_norms: tuple[Tensor, ...]
    """Factors of the norms of queries and keys; empty: there are none."""
    scale: float
    """Factor on the scores."""
    eps: tuple[float, float]
    """Epsilons of its norms and of its head norms."""


@dataclass(frozen=True)
class LeanShape:
    """The modules of a model that a lean pass uses."""

    embedding: nn.Embedding
    layers: tuple[LeanLayer, ...]
    norm: Tensor
    """Factors of the last norm."""
    eps: float
    """Epsilon of the last norm."""
    rotary: nn.Module
    head: nn.Linear

    def angles(self, like: Tensor, positions: Tensor, kinds: Iterable[AttentionKind]) -> Angles:
        """Return the model's own cosines and sines, in the dtype and on the device of `like`."""
        cos, sin = self.rotary(like[None], positions[None])
        angles: dict[PureRotation, tuple[Tensor, Tensor]] = {}
        for rotation in dict.fromkeys(kind.rotation for kind in kinds):
            if rotation is not None:
                half = rotation.dimensions // 2
                # The model repeats each angle, once for each of the two dimensions that it rotates.
                places = slice(0, half) if rotation.pairing == "halves" else slice(0, 2 * half, 2)
                angles[rotation] = cos[0, :, places].contiguous(), sin[0, :, places].contiguous()
        return angles


class NotLean(Exception):  # noqa: N818 - no failure: a model of another build
    """A reason why a model has no lean pass."""


def lean_shape(model: Any, heads: HeadShape, *, laid_out: bool = True) -> LeanShape:
    """Return a model's modules; raise `NotLean` if it is not built like Llama, with heads of this shape.

    Args:
        model: The model.
        heads: Shape of the heads of its layers.
        laid_out: Whether its weights are to be prepacked for the CPU that it is on.
    """
    inner, head, embedding = model.base_model, model.get_output_embeddings(), model.get_input_embeddings()
    if type(embedding) is not nn.Embedding or not isinstance(head, nn.Linear):
        raise NotLean("its embedding or its head is not a plain one")
    norm, rotary = getattr(inner, "norm", None), getattr(inner, "rotary_emb", None)
    if norm is None or rotary is None or not hasattr(inner, "layers") or has_more_than_factors(norm):
        raise NotLean("it has no final norm, or no rotary embedding of its own")
    if not {name for name, _ in inner.named_children()} <= {"embed_tokens", "layers", "norm", "rotary_emb"}:
        raise NotLean("it has modules beside its layers")
    activation = getattr(model.config.get_text_config(), "hidden_act", None)
    if activation not in ("silu", "swish"):
        raise NotLean(f"its activation is {activation}")
    if any(weight.is_inference() for weight in model.parameters()):
        raise NotLean("its weights were created in inference mode, where changes cannot be detected")
    dtypes = {weight.dtype for weight in model.parameters()}
    if len(dtypes) > 1:
        raise NotLean("its weights have several dtypes")
    if laid_out:
        _require_laid_out(model, dtypes)
    width, mlp = embedding.embedding_dim, getattr(inner.layers[0], "mlp", None)
    factors = norm.get_parameter("weight").detach()
    if (len(factors), head.in_features) != (width, width):
        raise NotLean("the widths of its head and its last norm do not match its embedding")
    shapes = _expected_shapes(heads, width, getattr(getattr(mlp, "down_proj", None), "in_features", 0))
    layers = tuple(_layer(layer, shapes) for layer in inner.layers)
    return LeanShape(embedding, layers, factors, _eps_of(norm), rotary, head)


def _require_laid_out(model: Any, dtypes: set[torch.dtype]) -> None:
    """Raise `NotLean` unless its weights can be prepacked for this CPU, and this is faster."""
    if dtypes - _DTYPES or any(weight.device.type != "cpu" for weight in model.parameters()):
        raise NotLean("its weights are not all float32, or all bfloat16, on a CPU")
    if torch.bfloat16 in dtypes and has_tiles() and not multiply_tiles():
        raise NotLean("on this CPU torch multiplies bfloat16 in tiles, but the kernels are not permitted to")


def _expected_shapes(heads: HeadShape, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a layer, by the path of its module."""
    queries, keys = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    outputs = {
        "qkv": ((queries, width), (keys, width), (keys, width)),
        "o": ((width, queries),),
        "gate_up": ((inner, width), (inner, width)),
        "down": ((width, inner),),
    }
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_NORMS, (width,))
    shapes |= dict.fromkeys(_HEAD_NORMS, (heads.head_dim,))
    for name, paths in _PRODUCTS.items():
        shapes |= zip(paths, outputs[name], strict=True)
    return shapes


def has_more_than_factors(norm: nn.Module) -> bool:
    """Return whether a norm has parameters other than `weight`."""
    return [name for name, _ in norm.named_parameters()] != ["weight"]


def _layer(layer: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> LeanLayer:
    leaves = {
        name: module for name, module in layer.named_modules() if next(module.parameters(False), None) is not None
    }
    if shapes.keys() - leaves.keys() not in (set(), set(_HEAD_NORMS)) or leaves.keys() - shapes.keys():
        raise NotLean(f"its layers are made of {', '.join(sorted(leaves))}")
    products = {name: tuple(_linear(leaves[path], path) for path in paths) for name, paths in _PRODUCTS.items()}
    norms, head_norms = ([leaves[name] for name in names if name in leaves] for names in (_NORMS, _HEAD_NORMS))
    if any(has_more_than_factors(norm) for norm in (*norms, *head_norms)):
        raise NotLean("its norms have other parameters than a weight")
    for path, module in leaves.items():
        if module.get_parameter("weight").shape != shapes[path]:
            raise NotLean(f"the widths of {path} do not match its heads and its embedding")
    if any(module.out_features % PANEL for modules in products.values() for module in modules[:-1]):
        raise NotLean(f"a layer's output size is not a multiple of {PANEL}")
    scale = getattr(layer.get_submodule("self_attn"), "scaling", None)
    if not isinstance(scale, float):
        raise NotLean("its attention has no scale")
    eps = [{_eps_of(norm) for norm in norms}, {_eps_of(norm) for norm in head_norms} or {0.0}]
    if any(len(values) > 1 for values in eps):
        raise NotLean("its norms differ")
    [first], [second] = eps
    factors, head_factors = (
        tuple(norm.get_parameter("weight").detach() for norm in both) for both in (norms, head_norms)
    )
    return LeanLayer(products, factors, head_factors, scale, (first, second))


def _linear(module: nn.Module, name: str) -> nn.Linear:
    if not isinstance(module, nn.Linear) or "forward" in vars(module) or type(module.weight.data) is not Tensor:
        raise NotLean(f"{name} is not a plain linear layer")
    return module


def joined_bias(modules: Sequence[nn.Linear], dtype: torch.dtype) -> Tensor | None:
    """Concatenate the biases of layers, with zeros for a layer without one; None if there is no bias."""
    device = next((module.bias.device for module in modules if module.bias is not None), None)
    if device is None:
        return None
    parts = (torch.zeros(m.out_features, device=device) if m.bias is None else m.bias.detach() for m in modules)
    return torch.cat([part.to(dtype) for part in parts])


def _eps_of(norm: nn.Module) -> float:
    """Return the epsilon of a norm; raise `NotLean` if it has none."""
    for name in ("variance_epsilon", "eps"):
        if isinstance(eps := getattr(norm, name, None), float):
            return eps
    raise NotLean("a norm has no epsilon")
