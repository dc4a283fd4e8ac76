"""The reference backend, slow and readable: one token at a time, in fp64, keys rotated instead of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout, QuerySpan, Read


class ReferenceBackend:
    """Dense attention without sharing, cutting or merging."""

    def prepare(self, layout: Layout, kind: AttentionKind) -> ReferenceAttention:
        return ReferenceAttention(layout, kind)


class ReferenceAttention:
    def __init__(self, layout: Layout, kind: AttentionKind) -> None:
        self.layout = layout
        self.kind = kind

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        rows = [self._attend_one(token, query[token], keys, values, scale, sinks) for token in range(len(query))]
        return torch.stack(rows).to(query.dtype)

    def _attend_one(
        self, token: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Attend from one token to all slots that it sees: [heads, head_dim]."""
        seen_keys, seen_values = [], []
        for read in self.layout.reads:
            for span in read.spans:
                if span.first <= token < span.first + span.count:
                    slots = torch.tensor(self._visible_slots(token, read, span), dtype=torch.long)
                    key, rotation = keys[:, slots].double(), self.kind.rotation
                    seen_keys.append(key if rotation is None else rotation.move(key, span.shift))
                    seen_values.append(values[:, slots].double())
        key, value = torch.cat(seen_keys, dim=1), torch.cat(seen_values, dim=1)
        group = query.shape[0] // key.shape[0]
        key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
        scores = torch.einsum("hd,hsd->hs", query.double(), key) * scale
        if self.kind.softcap is not None:
            scores = self.kind.softcap * (scores / self.kind.softcap).tanh()
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
        weights = scores.softmax(dim=-1)[:, : key.shape[1]]
        return torch.einsum("hs,hsd->hd", weights, value)

    def _visible_slots(self, token: int, read: Read, span: QuerySpan) -> list[int]:
        """Return the slots of a read that a token sees."""
        end = token - span.first + 1 if read.causal else read.length
        slots = range(read.start, read.start + end)
        for window in (read.window, self.kind.window):
            if window is not None:
                first = self.layout.positions[token] - window + 1 - span.shift - read.position
                slots = range(max(slots.start, read.start + first), slots.stop)
        return list(slots)
