"""The lean forward pass: one kernel call per decoder layer, between the model's own embedding and its head."""

from __future__ import annotations

import ctypes
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from choreo_agents.attention.backends.native import NativeAttention
from choreo_agents.attention.kind import HeadShape
from choreo_agents.attention.step import Attention, StepAttention
from choreo_agents.errors import KVMemoryError
from choreo_agents.kv.pool import KVPool
from choreo_agents.models.lean.made_of import ModelSnapshot
from choreo_agents.models.lean.shape import LeanLayer, LeanShape, joined_bias
from choreo_agents.models.weights.panels import scratch_for
from choreo_agents.models.weights.prepacked import PrepackedLinear, side_by_side
from choreo_agents.native.library import Kernels, floats, parallel
from choreo_agents.native.structs import FP32, DecoderStruct, LayerStruct, PassStruct

_SMALL_HEAD = 1 << 20
"""Weights of a head so small that it is prepacked beside the plain weights in any case."""


class LeanForward:
    """A forward pass of a Llama-like model on a CPU, in fp32, with weights and KV in fp32 or bfloat16.

    Args:
        model: The model.
        shape: Its modules, whose large weights may be prepacked again for it.
        heads: Shape of the heads of all its layers.
        kernels: The native kernels.
    """

    def __init__(self, model: nn.Module, shape: LeanShape, heads: HeadShape, kernels: Kernels) -> None:
        self._shape, self._heads, self._kernels = shape, heads, kernels
        last_norm = shape.norm.float()
        self._owned: list[Any] = [last_norm]
        """Objects that own the memory that the structs point to."""
        self._decoders = [self._make_decoder(layer) for layer in shape.layers]
        self._last = DecoderStruct(input_norm=last_norm.data_ptr(), eps=shape.eps)
        laid_out = isinstance(shape.head, PrepackedLinear) or shape.head.weight.numel() <= _SMALL_HEAD
        self._head = side_by_side((shape.head,), pairs=kernels.pairs) if laid_out else None
        self.made_of = ModelSnapshot(model)
        first = shape.layers[0]
        [o], [down] = first.products["o"], first.products["down"]
        self._width, self._inner = o.out_features, down.in_features
        self._longest = max(self._width, self._inner, o.in_features)
        self._layers: WeakKeyDictionary[KVPool, list[ctypes.Structure]] = WeakKeyDictionary()
        """Structs of the layers of each pool, with the addresses of its memory."""

    def serves(self, attention: Attention) -> TypeGuard[StepAttention]:
        """Return whether it can run a step with this attention."""
        if not isinstance(attention, StepAttention):
            return False
        return all(type(prepared) is NativeAttention for prepared in attention.prepared.values())

    def logits(self, tokens: Tensor, positions: Tensor, attention: StepAttention, indices: Tensor) -> Tensor:
        """Return logits, see `ModelAdapter.traced_logits`."""
        shape, head, heads, rows = self._shape, self._head, self._heads, len(tokens)
        x = functional.embedding(tokens, shape.embedding.weight).float()
        threads = torch.get_num_threads()
        wide = (heads.heads + 2 * heads.kv_heads) * heads.head_dim
        normed, qkv = floats(rows, self._width), floats(rows, wide)
        attended, gated = floats(rows, heads.heads * heads.head_dim), floats(rows, 2 * self._inner)
        scratch = scratch_for(self._decoders[0].o.dtype, threads, rows, self._longest)
        step = PassStruct(
            rows=rows,
            width=self._width,
            inner=self._inner,
            threads=threads,
            parallel=parallel(),
            x=x.data_ptr(),
            normed=normed.data_ptr(),
            qkv=qkv.data_ptr(),
            attended=attended.data_ptr(),
            gated=gated.data_ptr(),
            scratch=None if scratch is None else scratch.data_ptr(),
            scratch_each=0 if scratch is None else scratch.shape[1],
        )
        angles = shape.angles(x, positions, attention.prepared)
        plans = {}
        for kind, prepared in attention.prepared.items():
            assert isinstance(prepared, NativeAttention)
            plans[kind] = prepared.plan(heads).address
        tensors = [*attention.pool.keys, *attention.pool.values]  # keep the memory alive if the pool is closed now
        slots, at = attention.slots.data_ptr(), ctypes.addressof(step)
        for number, (decoder, layer) in enumerate(zip(self._decoders, self._layers_of(attention.pool), strict=True)):
            kind = attention.kinds[number]
            attention.wait(number)
            if kind.rotation is not None:
                cos, sin = angles[kind.rotation]
                step.cos, step.sin = cos.data_ptr(), sin.data_ptr()
            layer.slots = slots
            self._kernels.decode(ctypes.addressof(decoder), at, plans[kind], ctypes.addressof(layer))
        del tensors
        last = x[indices]
        normed = torch.empty_like(last)
        step.rows, step.x, step.normed = len(last), last.data_ptr(), normed.data_ptr()
        self._kernels.normalise(ctypes.addressof(self._last), at)
        if head is not None:
            return head.multiply(normed, shape.head.bias, self._kernels)
        logits: Tensor = shape.head(normed.to(shape.head.weight.dtype))
        return logits

    def _layers_of(self, pool: KVPool) -> list[ctypes.Structure]:
        if not pool.keys:
            raise KVMemoryError("the pool was given up")
        if pool not in self._layers or self._layers[pool][0].keys != pool.keys[0].data_ptr():
            layers = []
            for keys, values, layer in zip(pool.keys, pool.values, self._shape.layers, strict=True):
                head, slot, _ = keys.stride()
                where = {"keys": keys.data_ptr(), "values": values.data_ptr(), "pool_head": head, "pool_slot": slot}
                layers.append(LayerStruct(**where, scale=layer.scale, dtype=FP32))
            self._layers[pool] = layers
        return self._layers[pool]

    def _make_decoder(self, layer: LeanLayer) -> ctypes.Structure:
        """Return a layer's struct for the kernel."""
        products: dict[str, Any] = {}
        for name, modules in layer.products.items():
            panels, bias = side_by_side(modules, pairs=self._kernels.pairs), joined_bias(modules, torch.float32)
            products[name] = panels.struct(bias)
            self._owned += (panels, bias)
        weights = [norm.float() for norm in (*layer.norms, *layer.head_norms)]
        self._owned += weights
        # Without norms of heads, their pointers stay null.
        norms = zip(("input_norm", "inner_norm", "query_norm", "key_norm"), weights, strict=False)
        pointers = {name: weight.data_ptr() for name, weight in norms}
        eps, query_eps = layer.eps
        return DecoderStruct(**products, **pointers, eps=eps, query_eps=query_eps)
