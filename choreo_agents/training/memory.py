"""How much memory a differentiable pass takes, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence

from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.training.buckets import bucketed
from choreo_agents.training.packed import PackedTraces
from choreo_agents.training.trace import Trace

_WIDE = 4
"""Bytes of what is computed in fp32 whatever the model's dtype."""


def activation_bytes(adapter: ModelAdapter, traces: Sequence[Trace], *, checkpointed: bool) -> int:
    """Bytes that a pass keeps for the way back: an estimate, within a factor of two for the usual decoder layers.

    A layer keeps, of values in its dtype,

        for each token       4 hidden + 4 intermediate + 4 query + 2 key widths, and 4 hidden widths in fp32 (norms)
        for each seen key    2 key widths; where it is seen elsewhere than it stands, one more
        for each score       4 if scores are capped or there are sinks, else none

    and the pass twice the learnt tokens' logits in fp32, two hidden widths a token, and a mask for each kind of window.
    With checkpointing a layer keeps its input, and one at a time all of the above.

    Args:
        adapter: The model.
        traces: That the pass holds.
        checkpointed: Whether layers are computed again on the way back.
    """
    packed = PackedTraces.of(traces)
    tokens, size = len(packed.tokens), adapter.geometry.dtype.itemsize
    queries = adapter.heads * adapter.geometry.head_dim
    keys = adapter.geometry.kv_heads * adapter.geometry.head_dim
    hidden, intermediate = _widths(adapter)
    own = [message.count for message in packed.messages]
    seen = [message.count + sum(piece.count for piece in message.view) for message in packed.messages]
    buckets = bucketed(own, seen)
    seen_keys = sum(len(bucket.members) * bucket.keys for bucket in buckets)
    pairs = sum(len(bucket.members) * bucket.keys * bucket.queries for bucket in buckets)
    moved = {(p.first, p.shift): p.count for message in packed.messages for p in message.view if p.shift}
    rows = tokens + sum(mapped.count for mapped in packed.mapped)
    each = tokens * (hidden + intermediate + queries) * 4 * size + rows * 2 * keys * size + tokens * 4 * hidden * _WIDE
    each += (2 * seen_keys + sum(moved.values())) * keys * size
    capped = any(kind.softcap is not None for kind in adapter.kinds) or _has_sinks(adapter)
    each += 4 * pairs * adapter.heads * size if capped else 0
    windows = {kind.window for kind in adapter.kinds}
    masks = len(windows) * pairs * (adapter.heads // adapter.geometry.kv_heads) * size
    ends = masks + 2 * len(packed.targets) * adapter.vocabulary_size * _WIDE + 2 * tokens * hidden * size
    layers = adapter.geometry.layers
    return ends + (layers * tokens * hidden * size + each if checkpointed else layers * each)


def _widths(adapter: ModelAdapter) -> tuple[int, int]:
    """The hidden and the intermediate width: of all experts that a token goes through, where there are any."""
    config = adapter.model.config.get_text_config()
    hidden = int(config.hidden_size)
    plain = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    experts = getattr(config, "num_experts_per_tok", None)
    if not experts:
        return hidden, plain
    shared = int(getattr(config, "shared_expert_intermediate_size", None) or 0)
    return hidden, int(experts) * int(getattr(config, "moe_intermediate_size", None) or plain) + shared


def _has_sinks(adapter: ModelAdapter) -> bool:
    return any(name.endswith("sinks") for name, _ in adapter.model.named_parameters())
