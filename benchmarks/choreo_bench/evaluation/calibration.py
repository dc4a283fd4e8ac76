"""Calibration without training, as retrieval systems do it: attention to what was encoded apart is made sharper."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.synthesis.mapper import CacheMapper

TEMPERATURES = (0.7, 0.8, 0.9, 1.1, 1.25)
"""That are tried; 1 changes nothing."""


def tempered(geometry: KVGeometry, kinds: Sequence[AttentionKind], temperature: float) -> CacheMapper:
    """A mapper that divides the scores of branch tokens by a temperature, by scaling their keys.

    It is the attention temperature of adaptive parallel encoding, without that method's further factor on the sums.
    """
    width = geometry.kv_heads * geometry.head_dim
    mapper = CacheMapper(geometry, kinds, width)
    state = {name: torch.zeros_like(tensor) for name, tensor in mapper.state_dict().items()}
    state["key_down"] += torch.eye(width, dtype=torch.float32)
    state["key_up"] += torch.eye(width, dtype=torch.float32) * (1 / temperature - 1)
    mapper.load_state_dict(state)
    return mapper
