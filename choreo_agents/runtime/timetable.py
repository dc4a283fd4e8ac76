"""Records what each step of an engine held, and makes another engine run the same steps.

Matrix kernels change their last bits with the shape of a batch. Two runs that are to be compared bit by bit must share
every step, its rows and their chunks; when calls arrive is left to threads, so it has to be written down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

Name = tuple[str, str, str, int]
"""Author, role and kind of a request, and how many of them came before."""


class Named(Protocol):
    """What a request is known by in another run."""

    @property
    def number(self) -> int: ...

    @property
    def author(self) -> str | None: ...

    @property
    def role(self) -> str | None: ...

    @property
    def kind(self) -> str: ...


class Timetable:
    """Of one engine. An empty one is filled as the engine runs; `again()` gives one that is kept to.

    Requests are told apart by author, role and kind, and by the order of those alike; so a program whose calls all
    have authors of their own is followed exactly.
    """

    def __init__(self, steps: Sequence[Sequence[tuple[Name, int]]] | None = None) -> None:
        self.steps: list[tuple[tuple[Name, int], ...]] = []
        """Of each step so far, every row's request and tokens."""
        self._wanted = None if steps is None else [tuple(step) for step in steps]
        self._names: dict[int, Name] = {}
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def again(self) -> Timetable:
        """A timetable for another engine, which runs the steps of this one."""
        return Timetable(self.steps)

    @property
    def is_kept_to(self) -> bool:
        """Whether a next step is prescribed."""
        return self._wanted is not None and len(self.steps) < len(self._wanted)

    def name(self, request: Named) -> Name:
        """What a request is called in every run."""
        known = self._names.get(request.number)
        if known is None:
            kind = (request.author or "", request.role or "", request.kind)
            known = self._names[request.number] = (*kind, self._counts[kind])
            self._counts[kind] += 1
        return known

    def next_step(self, requests: Iterable[Named]) -> list[tuple[int, int]] | None:
        """The next step's rows as (number, tokens); None until all requests in it have come."""
        assert self._wanted is not None
        numbers = {self.name(request): request.number for request in sorted(requests, key=lambda each: each.number)}
        step = self._wanted[len(self.steps)]
        if any(name not in numbers for name, _ in step):
            return None
        return [(numbers[name], count) for name, count in step]

    def record(self, rows: Iterable[tuple[Named, int]]) -> None:
        """Write down a step that is about to run."""
        step = tuple((self.name(request), count) for request, count in rows)
        if step:
            self.steps.append(step)
