"""Records the steps of an engine, and makes another engine run the same steps.

Matrix kernels change their last bits with the shape of a batch. Two runs that are compared bit by bit must share every
step, its rows and their chunks; arrival times depend on threads, so the steps have to be recorded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Sequence

from choreo_agents.errors import InvalidRequestError
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.scheduler import Plan

PATIENCE_S = 20.0
"""Seconds to wait for the calls that a replayed step holds."""
Name = tuple[str, int]
"""A request's label, and the number of earlier requests with the same one."""


class StepTrace:
    """Steps of one engine. An empty trace is filled as the engine runs; `replay()` returns one that prescribes them.

    Requests are identified by label, and by order among equal labels.

    Args:
        steps: Steps to replay.
    """

    def __init__(self, steps: Sequence[Sequence[tuple[Name, int]]] | None = None) -> None:
        self.steps: list[tuple[tuple[Name, int], ...]] = []
        """Rows of each step so far: a request and its number of tokens."""
        self._prescribed = None if steps is None else [tuple(step) for step in steps]
        self._names: dict[int, Name] = {}
        self._counts: Counter[str] = Counter()
        self._since: float | None = None
        """Time of the first look for the next step since the last one ran."""

    def replay(self) -> StepTrace:
        """Return a trace that makes another engine run the steps of this one."""
        return StepTrace(self.steps)

    @property
    def is_replaying(self) -> bool:
        """True if a next step is prescribed."""
        return self._prescribed is not None and len(self.steps) < len(self._prescribed)

    def name(self, request: Request) -> Name:
        """Return a request's name, which is the same in every run."""
        name = self._names.get(request.number)
        if name is None:
            name = self._names[request.number] = (request.label, self._counts[request.label])
            self._counts[request.label] += 1
        return name

    def plan(self, requests: Iterable[Request], running: Container[int]) -> Plan | None:
        """Return the next step's plan, or None until all requests in it have arrived.

        Args:
            requests: All waiting and running requests.
            running: Numbers of the running ones.

        Raises:
            InvalidRequestError: They have not arrived for long, or cannot begin.
        """
        assert self._prescribed is not None
        numbers = {self.name(request): request.number for request in sorted(requests, key=lambda r: r.number)}
        step = self._prescribed[len(self.steps)]
        missing = sum(name not in numbers for name, _ in step)
        self._since = self._since or time.perf_counter()
        if numbers and time.perf_counter() - self._since > PATIENCE_S:
            late = f"{missing} calls that were not made" if missing else "calls that could not start"
            raise InvalidRequestError(
                f"step {len(self.steps) + 1} of the step trace waits for {late} in {PATIENCE_S} s: this program makes "
                "other calls than the recorded one"
            )
        if missing:
            return None
        chunks = tuple((numbers[name], count) for name, count in step)
        return Plan(tuple(number for number, _ in chunks if number not in running), (), chunks)

    def record(self, rows: Iterable[tuple[Request, int]]) -> None:
        """Record a step that is about to run."""
        step = tuple((self.name(request), count) for request, count in rows)
        if step:
            self.steps.append(step)
            self._since = None
