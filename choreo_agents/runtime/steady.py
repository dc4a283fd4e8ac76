"""Steps in which all that run sample a token, and nobody waits, comes or goes: each is the one before, a token further.

That nothing has happened is known without a look at each request: whoever changes something takes the engine's lock,
which counts; a call that is cancelled wakes the loop; and when the first gives up is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from choreo_agents.runtime.lock import EngineLock
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.step import Row
from choreo_agents.sampling import Chosen, Sampler


class Steady:
    """The rows of such a step.

    Args:
        rows: One of each request that runs, which samples after its only token.
        requests: Whose they are, in the same order.
        samplers: By request.
        lock: The engine's, which is held.
        changed: Set whenever there may be something to decide about.
    """

    def __init__(
        self,
        rows: list[Row],
        requests: Sequence[Request],
        samplers: Mapping[int, Sampler],
        lock: EngineLock,
        changed: threading.Event,
    ) -> None:
        self.samplers = samplers
        self.requests = requests
        self._rows = rows
        self._lock, self._taken = lock, lock.taken
        self._changed = changed
        deadlines = [deadline for request in requests for deadline in request.deadlines.values()]
        self._until = min(deadlines, default=float("inf"))
        for request in requests:
            request.tell_cancelled(changed.set)

    @staticmethod
    def suits(rows: Sequence[Row], running: int) -> bool:
        """Return whether these rows are those of all `running` requests, and each samples after its only token."""
        if not rows or len(rows) < running:
            return False
        return all(row.samples and len(row.tokens) == 1 for row in rows)

    def further(self, chosen: Mapping[int, Chosen]) -> list[Row] | None:
        """The next step's rows; None if something has happened, so that it has to be decided anew.

        Args:
            chosen: What the step has sampled; every row goes on with that.
        """
        if self._changed.is_set() or self._lock.taken != self._taken or time.perf_counter() >= self._until:
            return None
        self._rows = [
            Row(number, (chosen[number].token,), first + 1, segment, view, samples, adapter, mapper, tenant)
            for number, _, first, segment, view, samples, adapter, mapper, tenant, *_ in self._rows
        ]
        return self._rows
