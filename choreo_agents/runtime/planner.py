"""Who says what the next step does: a scheduling policy, or a timetable that is kept to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from choreo_agents.runtime.request import Request
from choreo_agents.runtime.scheduler import (
    FirstComeFirstServed,
    Limits,
    Plan,
    Running,
    SchedulingPolicy,
    Waiting,
    require_sound,
)
from choreo_agents.runtime.timetable import Timetable

Watch = Callable[[Sequence[tuple[Request, int]]], None]
"""Is told of a step: requests, and how many tokens of each."""


class Planner:
    """Of one engine.

    Args:
        policy: Decides.
        limits: Bounds of a step.
        timetable: Writes down every step, or prescribes them.
    """

    def __init__(self, policy: SchedulingPolicy, limits: Limits, timetable: Timetable | None) -> None:
        self._policy = policy
        self._limits = limits
        self._timetable = timetable
        self.watches: list[Watch] = []
        """Are told of every step, beside the timetable."""

    def plan(
        self, seen: Sequence[Waiting], waiting: Sequence[Request], running: Mapping[int, Request], free_tokens: int
    ) -> Plan | None:
        """The next step, if it is sound; None if the timetable's next one cannot run yet.

        Args:
            seen: What waits, as the policy sees it.
            waiting: All that waits.
            running: By number, in order of admission.
            free_tokens: KV room that is free or can be evicted.
        """
        if self._timetable is not None and self._timetable.is_kept_to:
            return self._timetable.plan([*waiting, *running.values()], running)
        served = [Running(r.number, r.pending, r.priority, r.tenant) for r in running.values()]
        plan = self._policy.plan(seen, served, free_tokens, self._limits)
        if type(self._policy) is not FirstComeFirstServed:
            require_sound(plan, seen, served, self._limits)
        return plan

    @property
    def repeats(self) -> bool:
        """Whether it says again of the same requests what it has said: a token of each that decodes, if none waits."""
        if self._timetable is not None and self._timetable.is_kept_to:
            return False
        return type(self._policy) is FirstComeFirstServed

    @property
    def is_told(self) -> bool:
        """Whether steps are to be recorded."""
        return self._timetable is not None or bool(self.watches)

    def record(self, chunks: Sequence[tuple[Request, int]]) -> None:
        """Write down a step that is about to run: requests, and how many tokens of each."""
        if self._timetable is not None:
            self._timetable.record(chunks)
        for watch in self.watches if chunks else ():
            watch(chunks)
