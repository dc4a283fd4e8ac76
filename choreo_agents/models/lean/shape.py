"""Finds the modules of models that are built like Llama, as the kernel's decoder layer is.

Names and shapes of modules decide how to compute; a comparison with the model's own logits then shows whether that is
right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from choreo_agents.attention.heads import HeadShape
from choreo_agents.attention.kind import AttentionKind
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
    norms: tuple[nn.Module, nn.Module]
    head_norms: tuple[nn.Module, nn.Module] | None
    scale: float
    """Factor on the scores."""
    eps: tuple[float, float]
    """Epsilons of its norms and of its head norms."""


@dataclass(frozen=True)
class LeanShape:
    """The modules of a model that a lean pass uses."""

    embedding: nn.Embedding
    layers: tuple[LeanLayer, ...]
    norm: nn.Module
    rotary: nn.Module
    head: nn.Linear

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules whose weights are read."""
        yield from (self.embedding, self.norm, self.rotary, self.head)
        for layer in self.layers:
            yield from (*chain.from_iterable(layer.products.values()), *layer.norms, *(layer.head_norms or ()))

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
    layers = tuple(_layer(layer) for layer in inner.layers)
    _require_widths(layers, heads, embedding, norm, head)
    return LeanShape(embedding, layers, norm, rotary, head)


def _require_laid_out(model: Any, dtypes: set[torch.dtype]) -> None:
    """Raise `NotLean` unless its weights can be prepacked for this CPU, and this is faster."""
    if dtypes - _DTYPES or any(weight.device.type != "cpu" for weight in model.parameters()):
        raise NotLean("its weights are not all float32, or all bfloat16, on a CPU")
    if torch.bfloat16 in dtypes and has_tiles() and not multiply_tiles():
        raise NotLean("on this CPU torch multiplies bfloat16 in tiles, but the kernels are not permitted to")


def _require_widths(
    layers: Sequence[LeanLayer], heads: HeadShape, embedding: nn.Embedding, norm: nn.Module, head: nn.Linear
) -> None:
    """Raise `NotLean` unless every weight has the width that the kernel assumes."""
    width, dim = embedding.embedding_dim, heads.head_dim
    inner = layers[0].products["down"][0].in_features
    own, shared = heads.heads * dim, heads.kv_heads * dim
    widths = {"qkv": (width, (own, shared, shared)), "gate_up": (width, (inner, inner))}
    widths |= {"o": (own, (width,)), "down": (inner, (width,))}
    fits = len(weight_of(norm)) == head.in_features == width
    for layer in layers:
        for name, modules in layer.products.items():
            inputs, outputs = widths[name]
            fits &= all(module.in_features == inputs for module in modules)
            fits &= tuple(module.out_features for module in modules) == outputs
        fits &= all(len(weight_of(layer_norm)) == width for layer_norm in layer.norms)
        fits &= all(len(weight_of(head_norm)) == dim for head_norm in layer.head_norms or ())
    if not fits:
        raise NotLean("the widths of its layers do not match its heads and its embedding")


def has_more_than_factors(norm: nn.Module) -> bool:
    """Return whether a norm has parameters other than `weight`."""
    return [name for name, _ in norm.named_parameters()] != ["weight"]


def _layer(layer: nn.Module) -> LeanLayer:
    leaves = {
        name: module for name, module in layer.named_modules() if next(module.parameters(False), None) is not None
    }
    expected = {*_NORMS, *chain.from_iterable(_PRODUCTS.values())}
    if not expected <= leaves.keys() or leaves.keys() - expected not in (set(), set(_HEAD_NORMS)):
        raise NotLean(f"its layers are made of {', '.join(sorted(leaves))}")
    products = {name: tuple(_linear(leaves[path], path) for path in names) for name, names in _PRODUCTS.items()}
    if any(module.out_features % PANEL for modules in products.values() for module in modules[:-1]):
        raise NotLean(f"a layer's output size is not a multiple of {PANEL}")
    first, second = (leaves[name] for name in _NORMS)
    head_norms = (leaves[_HEAD_NORMS[0]], leaves[_HEAD_NORMS[1]]) if _HEAD_NORMS[0] in leaves else None
    scale = getattr(layer.get_submodule("self_attn"), "scaling", None)
    if not isinstance(scale, float):
        raise NotLean("its attention has no scale")
    if any(has_more_than_factors(norm) for norm in (first, second, *(head_norms or ()))):
        raise NotLean("its norms have other parameters than a weight")
    if head_norms is not None and any(weight_of(norm).ndim != 1 for norm in head_norms):
        raise NotLean("it normalises all heads together")
    eps = [[eps_of(norm) for norm in norms] for norms in ((first, second), head_norms or ())]
    if any(len(set(values)) > 1 for values in eps):
        raise NotLean("its norms differ")
    return LeanLayer(products, (first, second), head_norms, scale, (eps[0][0], eps[1][0] if eps[1] else 0.0))


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


def weight_of(norm: nn.Module) -> Tensor:
    """Return a norm's factors in fp32, without a copy if they are fp32."""
    return norm.get_parameter("weight").detach().float()


def eps_of(norm: nn.Module) -> float:
    """Return the epsilon of a norm; raise `NotLean` if it has none."""
    for name in ("variance_epsilon", "eps"):
        if isinstance(eps := getattr(norm, name, None), float):
            return eps
    raise NotLean("a norm has no epsilon")
