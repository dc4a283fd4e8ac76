"""Protocol of an engine that is compared with others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

Timer = Callable[[], float]
"""Does the work once more and returns its seconds."""
Levels = Sequence[Sequence[Sequence[int]]]
"""A tree of prompts, level by level: the tokens of each node; as many children for each node of the level above."""


class Absent(Exception):  # noqa: N818 - no error of ours: the competitor is not there, or cannot do this
    """Reason why a competitor is not measured."""


@contextmanager
def absent_on_failure(name: str) -> Iterator[None]:
    """Turn whatever a competitor raises into the reason why it is not measured."""
    try:
        yield
    except Absent:
        raise
    except Exception as reason:
        first = next(iter(str(reason).strip().splitlines()), "")
        raise Absent(f"{name} fails: {type(reason).__name__} {first[:80]}".rstrip()) from reason


class Competitor(Protocol):
    """An engine to compare with: one way to serve a model."""

    name: str

    def first_token(self, messages: Sequence[Sequence[int]], order: Sequence[int], new: Sequence[int]) -> Timer:
        """Encode messages in the order they are given, untimed; time the first token after them in another order.

        Args:
            messages: Token ids of each.
            order: Indices of the messages, as the timed prompt has them.
            new: Tokens that follow, never seen before.

        Raises:
            Absent: It cannot do this.
        """
        ...

    def decode(self, levels: Levels, branches: int, steps: int) -> Timer:
        """Encode a tree of prompts, untimed; time one decode step of branches spread over its leaves.

        Args:
            levels: The tree.
            branches: Rows that decode at once, a multiple of the leaves.
            steps: Over which the time of a step is averaged.

        Raises:
            Absent: It cannot do this.
        """
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def after_prefixes(
    generate: Callable[[list[int]], object], messages: Sequence[Sequence[int]], order: Sequence[int], new: Sequence[int]
) -> Timer:
    """Make a timer of first tokens on a competitor that caches prompts, and finds their exact prefixes again.

    Args:
        generate: Encodes a prompt and gives its first token.
        messages: As for `Competitor.first_token`, like `order` and `new`.
    """
    calls = 0

    def timer() -> float:
        nonlocal calls
        calls += 1
        # Each time the messages are others, encoded in their first order before the clock starts.
        fresh = [[3 + (token + 7 * calls) % 290 for token in tokens] for tokens in messages]
        generate([token for tokens in fresh for token in tokens])
        prompt = [token for index in order for token in fresh[index]]
        started = time.perf_counter()
        generate([*prompt, *new])
        return time.perf_counter() - started

    return timer


def paths(levels: Levels, branches: int) -> list[tuple[tuple[int, int], ...]]:
    """Return for each branch the nodes above it, as (level, index) from the root on."""
    return [
        tuple((depth, branch * len(level) // branches) for depth, level in enumerate(levels))
        for branch in range(branches)
    ]
