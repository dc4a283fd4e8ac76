"""Which nodes come after which, by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def steps(names: Sequence[str], following: Iterable[tuple[str, Iterable[str]]]) -> list[list[int]]:
    """Of each name, by its place, the places of those that follow it; who is not named is left out.

    Args:
        names: Each once.
        following: Names, and some of what follows each.
    """
    numbers = {name: number for number, name in enumerate(names)}
    found: list[dict[int, None]] = [{} for _ in names]
    for start, ends in following:
        if start in numbers:
            found[numbers[start]].update((numbers[end], None) for end in ends if end in numbers)
    return [list(each) for each in found]
