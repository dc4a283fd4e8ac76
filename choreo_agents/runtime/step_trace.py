"""Records what each step of an engine held, and makes another engine run the same steps.

Matrix kernels change their last bits with the shape of a batch. Two runs that are to be compared bit by bit must share
every step, its rows and their chunks; when calls arrive is left to threads, so it has to be written down.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Sequence

from choreo_agents.errors import InvalidRequestError
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.scheduler import Plan

PATIENCE_S = 20.0
"""For calls that a kept-to step holds."""
Name = tuple[str, int]
"""A request's label, and how many with the same one came before."""


class StepTrace:
    """Of one engine. An empty one is filled as the engine runs; `again()` gives one that is kept to.

    Requests are told apart by what they are called, and by the order of those alike.

    Args:
        steps: That are kept to.
    """

    def __init__(self, steps: Sequence[Sequence[tuple[Name, int]]] | None = None) -> None:
        self.steps: list[tuple[tuple[Name, int], ...]] = []
        """Of each step so far, every row's request and tokens."""
        self._wanted = None if steps is None else [tuple(step) for step in steps]
        self._names: dict[int, Name] = {}
        self._counts: Counter[str] = Counter()
        self._since: float | None = None
        """When the next step was first looked for, since the last one ran."""

    def again(self) -> StepTrace:
        """A timetable for another engine, which runs the steps of this one."""
        return StepTrace(self.steps)

    @property
    def is_kept_to(self) -> bool:
        """Whether a next step is prescribed."""
        return self._wanted is not None and len(self.steps) < len(self._wanted)

    def name(self, request: Request) -> Name:
        """What a request is called in every run."""
        known = self._names.get(request.number)
        if known is None:
            known = self._names[request.number] = (request.label, self._counts[request.label])
            self._counts[request.label] += 1
        return known

    def plan(self, requests: Iterable[Request], running: Container[int]) -> Plan | None:
        """The next step; None until all requests in it have come.

        Args:
            requests: All that wait or run.
            running: The numbers of those that run.

        Raises:
            InvalidRequestError: They have not come for long, or cannot begin.
        """
        assert self._wanted is not None
        numbers = {self.name(request): request.number for request in sorted(requests, key=lambda each: each.number)}
        step = self._wanted[len(self.steps)]
        missing = sum(name not in numbers for name, _ in step)
        self._since = self._since or time.perf_counter()
        if numbers and time.perf_counter() - self._since > PATIENCE_S:
            late = f"{missing} calls that have not come" if missing else "calls that could not begin"
            raise InvalidRequestError(
                f"step {len(self.steps) + 1} of the timetable holds {late} in {PATIENCE_S} s: this program makes other "
                "calls than the one that was written down"
            )
        if missing:
            return None
        chunks = tuple((numbers[name], count) for name, count in step)
        return Plan(tuple(number for number, _ in chunks if number not in running), (), chunks)

    def record(self, rows: Iterable[tuple[Request, int]]) -> None:
        """Write down a step that is about to run."""
        step = tuple((self.name(request), count) for request, count in rows)
        if step:
            self.steps.append(step)
            self._since = None
