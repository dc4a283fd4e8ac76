"""Positions of branches when they are merged; nothing is copied (Parallel-Synthesis, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from choreo_agents.errors import InvalidRequestError

Strategy = Literal["parallel", "sequential", "text", "summary"]
"""Strategy by which branches are merged.

    parallel     their KV side by side, each from where it left the trunk
    sequential   their KV one after the other
    text         their text, encoded again one after the other: what a graph of strings does
    summary      summarized by its own worker each, then as `sequential`
"""
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class Anchored:
    """Positions of the first tokens of trunk messages and branches, and of what comes after all of them."""

    trunk: tuple[int, ...]
    branches: tuple[int, ...]
    end: int


def require_strategy(strategy: str) -> None:
    """Raise `InvalidRequestError` if there is no such strategy."""
    if strategy not in STRATEGIES:
        raise InvalidRequestError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")


def anchored(
    strategy: Strategy, trunk: Sequence[int], branches: Sequence[int], depths: Sequence[int] | None = None
) -> Anchored:
    """Place a trunk and its branches.

        trunk        |--- 0 ---|--- 1 ---|
        parallel               |-- a --|            a left after message 0,
                                         |- b -|    b after message 1
        sequential                       |-- a --|- b -|

    Args:
        strategy: `parallel`; any other places branches one after the other.
        trunk: Number of tokens of each message before the branches.
        branches: Number of tokens of each branch.
        depths: Number of trunk messages that each branch has seen; None: all of them.

    Returns:
        Positions; the next message starts after all branches.
    """
    starts = [*accumulate(trunk, initial=0)]
    if strategy == "parallel":
        offsets = [starts[depth] for depth in ([len(trunk)] * len(branches) if depths is None else depths)]
    else:
        offsets = [*accumulate(branches, initial=starts[-1])][:-1]
    ends = [offset + length for offset, length in zip(offsets, branches, strict=True)]
    return Anchored(tuple(starts[:-1]), tuple(offsets), max([starts[-1], *ends]))


SynthesisLayout = Literal["sequential", "parallel", "native"]
"""Layout of branches in the synthesizer's view.

    trunk        |----------|
    worker a     |----------|  notes a  |- a --|
    worker b     |----------|- b -|
    sequential   |----------|- a --|- b -| ask
    parallel     |----------|- a --|
                            |- b -|        ask
    native       |----------|           |- a --| ask
                            |- b -|
"""
SYNTHESIS_LAYOUTS: tuple[SynthesisLayout, ...] = get_args(SynthesisLayout)


def require_synthesis_layout(layout: str) -> None:
    """Raise `ValueError` if there is no such layout."""
    if layout not in SYNTHESIS_LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: use one of {', '.join(SYNTHESIS_LAYOUTS)}")


def place_branches(
    layout: SynthesisLayout, trunk: Sequence[int], branches: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int], int]:
    """Return the positions of trunk messages, of branches, and of the prompt after them, in a synthesizer's view.

    Args:
        layout: See `SynthesisLayout`.
        trunk: Number of tokens of each message of the trunk.
        branches: For each branch, the position at which its worker encoded it, and its number of tokens.

    Returns:
        The trunk's offsets, the branches' offsets, and the first position after all of them.
    """
    lengths = [length for _, length in branches]
    placed = anchored("sequential" if layout == "sequential" else "parallel", trunk, lengths)
    if layout != "native":
        return list(placed.trunk), list(placed.branches), placed.end
    ends = [start + length for start, length in branches]
    return list(placed.trunk), [start for start, _ in branches], max(sum(trunk), *ends)
