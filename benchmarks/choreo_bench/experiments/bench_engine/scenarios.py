"""The work that is timed, as plain data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SpeedScenario:
    """A first token after messages that were encoded before, or the decode steps of branches over a tree."""

    name: str
    levels: tuple[tuple[int, ...], ...]
    """Tokens of each message, level by level; a first token's messages are one level of as many roots."""
    order: tuple[int, ...] = ()
    """Of a first token: how the prompt has the messages."""
    new: int = 32
    """Of a first token: tokens that follow them."""
    branches: int = 0
    """Of decode steps: rows at once."""
    steps: int = 8
    """Of decode steps: over which one is averaged."""

    @property
    def is_decode(self) -> bool:
        return self.branches > 0

    def tokens(self) -> int:
        """Of KV that it needs, each message once, with what its branches add."""
        own = self.branches * (self.steps + 66) if self.is_decode else self.new + 66
        return sum(length + 64 for level in self.levels for length in level) + own

    def copied_tokens(self) -> int:
        """The same, with a copy for every row."""
        if not self.is_decode:
            return self.tokens()
        leaves = [sum(level[0] for level in self.levels)] * self.branches
        return sum(leaves) + self.branches * (self.steps + 1)

    def drawn(self, seed: int = 0) -> list[list[list[int]]]:
        """Random tokens of every message."""
        rng = random.Random(f"{self.name} {seed}")
        return [[[rng.randrange(3, 300) for _ in range(length)] for length in level] for level in self.levels]


SCENARIOS: Sequence[SpeedScenario] = (
    SpeedScenario("first token, reordered reuse", ((1024,) * 4,), order=(2, 0, 3, 1)),
    SpeedScenario("first token, same order", ((1024,) * 4,), order=(0, 1, 2, 3)),
    SpeedScenario("decode, 1 branch over 64", ((64,),), branches=1),
    SpeedScenario("decode, 8 branches over 4k", ((4096,),), branches=8),
    SpeedScenario("decode, 32 branches over 4k", ((4096,),), branches=32),
    SpeedScenario("decode, 32 branches over 1k", ((1024,),), branches=32),
    SpeedScenario("decode, 32 branches over 16k", ((16384,),), branches=32),
    SpeedScenario("decode, 32 branches, tree 2k + 4 x 512", ((2048,), (512,) * 4), branches=32),
)


def scaled(scenario: SpeedScenario, share: float) -> SpeedScenario:
    """The same with shorter messages, for a quick look."""
    levels = tuple(tuple(max(8, round(length * share)) for length in level) for level in scenario.levels)
    return replace(scenario, levels=levels)
