"""Cuts traces into batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from choreo_agents.training.trace import Trace


def tokens_of(trace: Trace) -> int:
    """What a trace costs, if nothing else is said: the tokens that a pass encodes for it."""
    return trace.tokens


def batched(traces: Sequence[Trace], most: int, cost: Callable[[Trace], int] = tokens_of) -> list[list[Trace]]:
    """Cut traces, in their order, into batches that cost at most so much together; a dearer trace is one of its own.

    Args:
        traces: What to cut.
        most: Of tokens, or of whatever `cost` counts.
        cost: Of one trace.
    """
    batches: list[list[Trace]] = []
    left = 0
    for trace in traces:
        price = cost(trace)
        if not batches or price > left:
            batches.append([])
            left = most
        batches[-1].append(trace)
        left -= price
    return batches
