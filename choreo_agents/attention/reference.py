"""The slow, readable oracle: one token at a time, fp64, keys rotated instead of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from choreo_agents.attention.layout import Layout
from choreo_agents.attention.rope import PureRotation


class ReferenceBackend:
    """Dense attention without sharing or merging."""

    def __init__(self, rotation: PureRotation) -> None:
        self.rotation = rotation

    def prepare(self, layout: Layout) -> ReferenceAttention:
        return ReferenceAttention(layout, self.rotation)


class ReferenceAttention:
    def __init__(self, layout: Layout, rotation: PureRotation) -> None:
        self.layout = layout
        self.rotation = rotation

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        rows = [self._attend_one(token, query[token], keys, values, scale) for token in range(len(query))]
        return torch.stack(rows).to(query.dtype)

    def _attend_one(self, token: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """All that one token sees, concatenated: [heads, head_dim]."""
        seen_keys, seen_values = [], []
        for read in self.layout.reads:
            for span in read.spans:
                if not span.first <= token < span.first + span.count:
                    continue
                end = read.start + (token - span.first + 1 if read.causal else read.length)
                seen_keys.append(self._moved(keys[:, read.start : end].double(), span.shift))
                seen_values.append(values[:, read.start : end].double())
        key, value = torch.cat(seen_keys, dim=1), torch.cat(seen_values, dim=1)
        group = query.shape[0] // key.shape[0]
        key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
        scores = torch.einsum("hd,hsd->hs", query.double(), key) * scale
        return torch.einsum("hs,hsd->hd", scores.softmax(dim=-1), value)

    def _moved(self, keys: Tensor, shift: int) -> Tensor:
        """Keys [kv_heads, slots, head_dim] as if encoded `shift` positions later."""
        positions = torch.full((keys.shape[1],), shift, device=keys.device)
        cos, sin = self.rotation.cos_sin(positions)
        return self.rotation.apply(keys.transpose(0, 1), cos, sin).transpose(0, 1)
