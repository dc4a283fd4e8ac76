"""Joins the partial attention of queries over several runs of slots, by the runs' log-sum-exps."""

from __future__ import annotations

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from choreo_agents.attention.backends.partial import Partial
from choreo_agents.attention.packing import SentTables

Integers = NDArray[numpy.int64]

_MOST_PADDING = 4
"""Upper bound on the padded parts per real part: above it, parts are scattered instead of padded."""


class LogSumExpMerge:
    """An exact merge of partial softmax attentions: each part's weight is its share of the summed exponentials.

    If all tokens have about as many parts, these are gathered side by side; else each is added to its token.

    parts     [tokens, most parts]      pairs of each token; padded with the empty pair, which is after the last

    Args:
        tokens: [pairs], the token of each pair, on the host; every token has at least one pair.
        count: Number of tokens.
        device: Of the parts; None: the host.
    """

    def __init__(self, tokens: Tensor | Integers, count: int, device: torch.device | None = None) -> None:
        pair_tokens = numpy.asarray(tokens, dtype=numpy.int64)
        self._count = count
        parts = numpy.bincount(pair_tokens, minlength=count)
        most = int(parts.max())
        self._even = most * count == len(pair_tokens)
        arrays = {"tokens": pair_tokens}
        if most * count <= _MOST_PADDING * len(pair_tokens):
            order = pair_tokens.argsort(kind="stable")
            across = numpy.arange(most)[None, :]
            at = ((parts.cumsum() - parts)[:, None] + across).clip(max=len(pair_tokens) - 1)
            arrays["parts"] = numpy.where(across < parts[:, None], order[at], len(pair_tokens))
        packed = SentTables(arrays, torch.device("cpu") if device is None else device)
        self._tokens = packed["tokens"]
        self._parts = packed["parts"] if "parts" in arrays else None

    def join(self, outs: Tensor, lses: Tensor, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Merge [pairs, heads, head_dim] partial outputs by their log-sum-exps [pairs, heads], fp32.

        Returns:
            [count, heads, head_dim] in the dtype of `outs`, and, if `with_lse`, the joint log-sum-exp [count, heads].
        """
        if self._parts is None:
            return self._join_scattered(outs, lses)
        if not self._even:
            outs = torch.cat([outs, outs.new_zeros(1, *outs.shape[1:])])
            lses = torch.cat([lses, lses.new_full((1, lses.shape[1]), float("-inf"))])
        if self._count == 1:
            side_by_side, parts = lses[None], outs[None]
        else:
            side_by_side, parts = lses[self._parts], outs[self._parts]
        weights = side_by_side.softmax(dim=1)
        out = (parts.to(lses.dtype) * weights[..., None]).sum(dim=1).to(outs.dtype)
        return out, side_by_side.logsumexp(dim=1) if with_lse else None

    def _join_scattered(self, outs: Tensor, lses: Tensor) -> Partial:
        """Merge any number of parts per token, by adding each part to its token."""
        tokens, count, heads = self._tokens, self._count, lses.shape[1]
        index = tokens[:, None].expand(-1, heads)
        highest = torch.full((count, heads), float("-inf"), device=lses.device, dtype=lses.dtype)
        highest = highest.scatter_reduce(0, index, lses, reduce="amax")
        weights = (lses - highest[tokens]).exp()
        total = torch.zeros_like(highest).index_add(0, tokens, weights)
        wide = torch.zeros((count, *outs.shape[1:]), device=outs.device, dtype=lses.dtype)
        wide = wide.index_add(0, tokens, outs.to(lses.dtype) * weights[..., None])
        return (wide / total[..., None]).to(outs.dtype), highest + total.log()
