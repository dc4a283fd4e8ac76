"""Attention over one run of slots, with its log-sum-exp, and the merge of several runs by these."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from choreo_agents.attention.packing import SentTables

Partial = tuple[Tensor, Tensor]
"""Output [heads, queries, head_dim] in the query's dtype and log-sum-exp [heads, queries] in fp32."""

_MOST_PADDING = 4
"""Upper bound on the padded parts per real part: above it, parts are scattered instead of padded."""
_flash_for_cpu: Callable[..., Partial] | None = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None
)


def attend_run(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    causal: bool,
    hidden: Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Compute attention of [heads, queries, head_dim] over [kv_heads, slots, head_dim], with its log-sum-exp.

    Args:
        query: `heads` is a multiple of `kv_heads`: query head h reads key head h // (heads / kv_heads).
        keys: At least one slot.
        values: Like `keys`.
        scale: Factor on the scores.
        causal: As many queries as slots, query i sees slots 0 to i.
        hidden: [queries, slots] mask, 0 where a query sees a slot and else -inf, in the query's dtype; each query
            sees at least one. Replaces `causal`.
        softcap: Bounds the scores, see `AttentionKind`.
    """
    # The flash kernel takes bf16 with a single query far slower than a matrix product does.
    slow_single = query.dtype != torch.float32 and query.shape[1] == 1
    if softcap is None and _flash_for_cpu is not None and query.device.type == "cpu" and not slow_single:
        mask = None if hidden is None else hidden[None, None]
        causal = causal and hidden is None
        out, lse = _flash_for_cpu(query[None], keys[None], values[None], 0.0, causal, attn_mask=mask, scale=scale)
        return out[0], lse[0]
    return matmul_attention(query, keys, values, scale, causal=causal, hidden=hidden, softcap=softcap)


def takes_lone(device: torch.device) -> bool:
    """Return whether `attend_lone` works on a device."""
    return _flash_for_cpu is not None and device.type == "cpu"


def attend_lone(
    queries: Tensor, keys: Tensor, values: Tensor, runs: Sequence[tuple[int, int]], scale: float
) -> Partial:
    """Attend from each query to a run of its own, with few calls around the kernel: for rows that decode.

    Args:
        queries: [runs, heads, head_dim]; there are more heads than key heads.
        keys: [kv_heads, slots, head_dim], all of the pool.
        values: Like `keys`.
        runs: First slot and length of each run.
        scale: Factor on the scores.

    Returns:
        Output [runs, heads, head_dim] and log-sum-exp [runs, heads].
    """
    assert _flash_for_cpu is not None
    count, heads, dim = queries.shape
    grouped = queries.reshape(count, keys.shape[0], -1, dim)
    whole_keys, whole_values = keys[None], values[None]
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for index, (start, length) in enumerate(runs):
        out, lse = _flash_for_cpu(
            grouped[index : index + 1],
            whole_keys.narrow(2, start, length),
            whole_values.narrow(2, start, length),
            0.0,
            False,
            attn_mask=None,
            scale=scale,
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs).reshape(count, heads, dim), torch.cat(lses).reshape(count, heads)


def attend_padded(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float, softcap: float | None = None
) -> Partial:
    """Attend to a batch of padded runs: [runs, heads, queries, head_dim] over [runs, heads, slots, head_dim].

    Args:
        query: With as many heads as keys.
        keys: Padded with any finite keys; at least one slot of each run is real.
        values: Like `keys`.
        hidden: [runs, 1, 1, slots], 0 where a slot is real and -inf where it is padding, in the query's dtype.
        scale: Factor on the scores.
        softcap: As for `attend_run`.
    """
    if softcap is None and _flash_for_cpu is not None and query.device.type == "cpu":
        mask = hidden.expand(-1, 1, query.shape[2], -1)
        return _flash_for_cpu(query, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    scores = _capped((query @ keys.transpose(2, 3)).float() * scale, softcap) + hidden
    lse = scores.logsumexp(dim=-1)
    return (scores - lse[..., None]).exp().to(values.dtype) @ values, lse


def matmul_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    causal: bool,
    hidden: Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Compute `attend_run` by plain matrix products, on any device and with gradients."""
    heads, queries, dim = query.shape
    kv_heads, slots, _ = keys.shape
    folded = query.reshape(kv_heads, heads // kv_heads * queries, dim)
    scores = _capped((folded @ keys.transpose(1, 2)).float() * scale, softcap).view(heads, queries, slots)
    if hidden is not None:
        scores = scores + hidden
    elif causal:
        later = torch.ones(queries, slots, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp().to(values.dtype)
    out = weights.view(kv_heads, -1, slots) @ values
    return out.view(heads, queries, dim), lse


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * (scores / softcap).tanh()


class LogSumExpMerge:
    """An exact merge of partial softmax attentions: each part's weight is its share of the summed exponentials.

    If all tokens have about as many parts, these are gathered side by side; else each is added to its token.

    parts     [tokens, most parts]      pairs of each token; padded with the empty pair, which is after the last

    Args:
        tokens: [pairs], the token of each pair, on the host; every token has at least one pair.
        count: Number of tokens.
        device: Of the parts; None: the host.
    """

    def __init__(self, tokens: Tensor | NDArray[numpy.int64], count: int, device: torch.device | None = None) -> None:
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
