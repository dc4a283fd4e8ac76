"""The contract of what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

Timer = Callable[[], float]
"""Does the work once more and returns its seconds."""
Levels = Sequence[Sequence[Sequence[int]]]
"""A tree of prompts, level by level: the tokens of each node; as many children for each node of the level above."""


class Absent(Exception):  # noqa: N818 - no error of ours: the rival is not there, or cannot do this
    """Why a rival is not measured."""


@contextmanager
def absent_on_failure(name: str) -> Iterator[None]:
    """Whatever a rival raises becomes the reason why it is not measured."""
    try:
        yield
    except Absent:
        raise
    except Exception as reason:
        first = next(iter(str(reason).strip().splitlines()), "")
        raise Absent(f"{name} fails: {type(reason).__name__} {first[:80]}".rstrip()) from reason


class Rival(Protocol):
    """One way to serve a model."""

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
    """Times a first token on a rival that keeps what it was asked before, and finds exact prefixes of it again.

    Args:
        generate: Encodes a prompt and gives its first token.
        messages: As for `Rival.first_token`, like `order` and `new`.
    """
    calls = 0

    def timer() -> float:
        nonlocal calls
        calls += 1
        # Each time the messages are others, encoded in their first order before the clock starts.
        fresh = [[3 + (token + 7 * calls) % 290 for token in tokens] for tokens in messages]
        generate([token for tokens in fresh for token in tokens])
        asked = [token for index in order for token in fresh[index]]
        started = time.perf_counter()
        generate([*asked, *new])
        return time.perf_counter() - started

    return timer


def paths(levels: Levels, branches: int) -> list[tuple[tuple[int, int], ...]]:
    """For each branch the nodes above it, as (level, index) from the root on."""
    return [
        tuple((depth, branch * len(level) // branches) for depth, level in enumerate(levels))
        for branch in range(branches)
    ]
