"""Where a synthesizer sees its branches: positions only, for those who play problems and those who train on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from choreo_agents.synthesis.strategies import anchored

SynthesisLayout = Literal["sequential", "parallel", "native"]
"""Where branches appear to the synthesizer.

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
    """Raise `ValueError` unless there is such a layout."""
    if layout not in SYNTHESIS_LAYOUTS:
        raise ValueError(f"there is no layout {layout!r}: there are {', '.join(SYNTHESIS_LAYOUTS)}")


def place_branches(
    layout: SynthesisLayout, trunk: Sequence[int], branches: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int], int]:
    """Positions of trunk messages and of branches as the synthesizer sees them, and of what it is asked.

    Args:
        layout: See there.
        trunk: Tokens of each message of the trunk.
        branches: For each branch, where its worker encoded it, and its tokens.

    Returns:
        The trunk's offsets, the branches' offsets, and the first position after all of them.
    """
    lengths = [length for _, length in branches]
    placed = anchored("sequential" if layout == "sequential" else "parallel", trunk, lengths)
    if layout != "native":
        return list(placed.trunk), list(placed.branches), placed.end
    ends = [start + length for start, length in branches]
    return list(placed.trunk), [start for start, _ in branches], max(sum(trunk), *ends)
