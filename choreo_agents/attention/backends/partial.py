"""Attention over one run of slots, with the log-sum-exp by which several runs are merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Partial = tuple[Tensor, Tensor]
"""Output [heads, queries, head_dim] in the query's dtype and log-sum-exp [heads, queries] in fp32."""

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
