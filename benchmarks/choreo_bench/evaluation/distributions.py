"""How far two distributions over tokens are from each other."""

from __future__ import annotations

from torch import Tensor


def divergence(one: Tensor, other: Tensor) -> float:
    """Kullback and Leibler's, from what some logits say to what others do, in nats.

    Args:
        one: [vocabulary].
        other: [vocabulary].
    """
    a, b = one.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((a.exp() * (a - b)).sum().clamp_min(0.0))
