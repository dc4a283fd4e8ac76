"""A linear probe: how well can a label be read from numbers?"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

FOLDS = 5
RIDGE = 1.0
"""Weight of the penalty, relative to the mean square of the features."""


def readable(features: Sequence[Sequence[float]], labels: Sequence[str], *, seed: int = 0) -> float:
    """The share of held-out examples whose label a ridge-regularised linear map gets right, over five folds.

    Args:
        features: [examples, numbers].
        labels: One for each.
        seed: Of the folds.
    """
    names = sorted(set(labels))
    inputs = torch.tensor(features, dtype=torch.float64)
    wanted = torch.tensor([names.index(label) for label in labels])
    order = list(range(len(labels)))
    random.Random(seed).shuffle(order)
    right = 0
    for fold in range(min(FOLDS, len(order))):
        held = order[fold::FOLDS]
        kept = [index for index in order if index not in held]
        if kept:
            right += int((_fitted(inputs[kept], wanted[kept], len(names), inputs[held]) == wanted[held]).sum())
    return right / len(labels)


def _fitted(inputs: Tensor, wanted: Tensor, classes: int, asked: Tensor) -> Tensor:
    """Classes that a map fitted on some examples gives to others; in its dual form, for more numbers than examples."""
    middle, spread = inputs.mean(dim=0), inputs.std(dim=0, unbiased=False).clamp_min(1e-9)
    inputs, asked = (inputs - middle) / spread, (asked - middle) / spread
    targets = torch.nn.functional.one_hot(wanted, classes).double()
    shift = targets.mean(dim=0)
    kernel = inputs @ inputs.T
    penalty = RIDGE * kernel.diagonal().mean().clamp_min(1e-9)
    weights = torch.linalg.solve(kernel + penalty * torch.eye(len(inputs), dtype=torch.float64), targets - shift)
    scores: Tensor = asked @ inputs.T @ weights + shift
    return scores.argmax(dim=-1)
