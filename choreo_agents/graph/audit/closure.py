"""Reachability in a directed graph for all nodes at once. Node sets are bit masks in Python integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Following = Sequence[Sequence[int]]
"""For each node number, the numbers of its successors."""


def propagate(following: Following, initial: Sequence[int]) -> list[int]:
    """Return for each node, as a bit mask, its initial bits and those of all nodes that lead to it."""
    masks = list(initial)
    for component in reversed([*components(following)]):
        mask = 0
        for node in component:
            mask |= masks[node]
        for node in component:
            masks[node] = mask
            for after in following[node]:
                masks[after] |= mask
    return masks


def components(following: Following) -> Iterator[list[int]]:
    """Yield the strongly connected components, successors first.

    Source: Tarjan, Depth-first search and linear graph algorithms (1972). Iterative, since chains can exceed the
    recursion limit.
    """
    order = [0] * len(following)  # of discovery, from 1 on; 0: not yet discovered
    lowest = [0] * len(following)
    met, open_, is_open = 0, list[int](), [False] * len(following)
    for root in range(len(following)):
        if order[root]:
            continue
        path = [(root, iter(following[root]))]
        while path:
            node, successors = path[-1]
            if not order[node]:
                met += 1
                order[node] = lowest[node] = met
                open_.append(node)
                is_open[node] = True
            for after in successors:
                if not order[after]:
                    path.append((after, iter(following[after])))
                    break
                if is_open[after]:
                    lowest[node] = min(lowest[node], order[after])
            else:
                path.pop()
                if path:
                    before = path[-1][0]
                    lowest[before] = min(lowest[before], lowest[node])
                if lowest[node] == order[node]:
                    component: list[int] = []
                    while not component or component[-1] != node:
                        component.append(open_.pop())
                        is_open[component[-1]] = False
                    yield component


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers in a bit mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
