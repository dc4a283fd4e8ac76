"""Who is under way: the requests that wait and those that run, until they end."""

from __future__ import annotations

import time
from collections.abc import Iterator

from choreo_agents.errors import ChoreoError, EngineClosedError, RequestTimeoutError
from choreo_agents.runtime.admission import Admission
from choreo_agents.runtime.endings import Endings
from choreo_agents.runtime.request import Request


class UnderWay:
    """All requests that were submitted and have not ended. Used under the engine's lock.

    Args:
        admission: Has those that wait.
        endings: Ends them.
    """

    def __init__(self, admission: Admission, endings: Endings) -> None:
        self.running: dict[int, Request] = {}
        """By number, in order of admission."""
        self._admission = admission
        self._endings = endings
        self._leaving: set[Request] = set()
        """Whose tenants have left."""

    def __len__(self) -> int:
        return len(self._admission.waiting) + len(self.running)

    def __iter__(self) -> Iterator[Request]:
        """All as they are now, whatever ends meanwhile."""
        return iter([*self._admission.waiting, *self.running.values()])

    def leave(self, tenant: str) -> None:
        """Drop a tenant's requests before the next step."""
        self._leaving.update(request for request in self if request.tenant == tenant)

    def drop_left(self) -> None:
        """Drop what nobody waits for any more, and what tenants have left."""
        leaving, self._leaving = self._leaving, set()
        for request in leaving:
            self.drop(request, EngineClosedError("the tenancy was closed before this call was done"))
        now = time.perf_counter()
        for request in self:
            late = request.late(now)
            for future in late:
                if future.set_running_or_notify_cancel():
                    future.set_exception(RequestTimeoutError("the call was not done in time: see its timeout_s"))
            if request.cancelled():
                self.drop(request, None, "timed out" if late else "cancelled")

    def finish(self, request: Request) -> None:
        """End a running request that has nothing left to do."""
        del self.running[request.number]
        self._endings.finish(request)

    def drop(self, request: Request, error: ChoreoError | None, outcome: str = "failed") -> None:
        """End a request without a result and give its memory back; with it, who reads what it will not encode.

        One that has ended already stays as it is.
        """
        if request.over:
            return
        if self.running.pop(request.number, None) is None and request in self._admission.waiting:
            self._admission.waiting.remove(request)
        readers = [other for other in self.running.values() if other.reads_unencoded_of(request)]
        self._endings.drop(request, error, outcome)
        for reader in readers:
            self.drop(reader, error or EngineClosedError("what the call reads was given up before it was encoded"))

    def drop_all(self, error: ChoreoError) -> None:
        """End all requests with an error."""
        for request in self:
            self.drop(request, error)
