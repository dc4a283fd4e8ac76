"""What leads where in a directed graph, of all its nodes at once: sets of nodes as bits of whole numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Following = Sequence[Sequence[int]]
"""Of each node, by number, the nodes that come next."""


def ahead(following: Following) -> list[int]:
    """Of each node, as bits, all that it leads to in one step or more: itself, if it is on a circle."""
    found = [0] * len(following)
    for component in components(following):
        reached = 0
        for node in component:
            for after in following[node]:
                reached |= found[after] | 1 << after
        for node in component:
            found[node] = reached
    return found


def arrived(following: Following, held: Sequence[int]) -> list[int]:
    """Of each node, as bits, all that is held by it or by any node that leads to it."""
    found = list(held)
    for component in reversed([*components(following)]):
        here = 0
        for node in component:
            here |= found[node]
        for node in component:
            found[node] = here
            for after in following[node]:
                found[after] |= here
    return found


def turned(following: Following) -> list[list[int]]:
    """The same graph, its edges turned around."""
    found: list[list[int]] = [[] for _ in following]
    for node, after in enumerate(following):
        for each in after:
            found[each].append(node)
    return found


def components(following: Following) -> Iterator[list[int]]:
    """Nodes that lead to each other, together; those that lead to others behind these.

    Source: Tarjan, Depth-first search and linear graph algorithms (1972); without recursion, as chains are long.
    """
    order = [0] * len(following)  # in which nodes were met, from 1 on
    lowest = [0] * len(following)
    met, open_, is_open = 0, list[int](), [False] * len(following)
    for root in range(len(following)):
        if order[root]:
            continue
        path = [(root, iter(following[root]))]
        while path:
            node, left = path[-1]
            if not order[node]:
                met += 1
                order[node] = lowest[node] = met
                open_.append(node)
                is_open[node] = True
            for after in left:
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
    """The numbers in a set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
