"""Messages under way: who waits for one, and what becomes of it when its request has ended."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from choreo_agents.engine.calls import Usage
from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.intake import Intake
from choreo_agents.engine.labels import Label
from choreo_agents.engine.methods import Job, grown
from choreo_agents.engine.scope import Scope
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.segment import Segment
from choreo_agents.runtime.request import Decoding, Request

Answer = Future[MessageHandle]


@dataclass(eq=False)
class Pending:
    """A message that a request will be: owns the request (see `Owner`)."""

    core: EngineCore
    intake: Intake
    job: Job
    encodes_end: bool
    memo: str | None = None
    running: dict[str, Request] = field(default_factory=dict)
    """Where the same call finds this request while it is under way, by `key`."""
    key: str | None = None
    scopes: dict[Answer, Scope | None] = field(default_factory=dict)
    """Who waits for it, and under which leases."""
    labels: list[Label] = field(default_factory=list)
    """What those who wait say about the message."""
    prefills: set[Answer] = field(default_factory=set)
    """Those who asked for it to be encoded now: all but one of them have found it."""

    def request(self, author: str | None, role: str | None, decoding: Decoding | None = None) -> Request:
        """Its request, which wants what it reads from now on."""
        encoding = self.core.method.encoding(self.job)
        request = Request(self.core.next_number(), encoding, self, decoding, author, role, [])
        request.adapter, request.mapper = self.job.adapter, self.job.mapper
        return request

    def finish(self, request: Request) -> MessageHandle:
        """Make a message of the finished request, with a lease for everyone who waits for it."""
        segment = request.encoding.close(request)
        try:
            return self._enter(request, segment)
        except BaseException:
            if segment is not None and segment.pins:
                self.core.pool.unpin(segment)
            raise

    def abandon(self, request: Request) -> None:
        """Give back all that an unfinished request holds."""
        self._forget()
        segment = request.encoding.close(request)
        if segment is not None:
            self.core.pool.unpin(segment)

    def _enter(self, request: Request, segment: Segment | None) -> MessageHandle:
        assert request.binding is not None
        ledger = self.core.ledger
        self._forget()
        tokens = self.job.tokens + tuple(request.tokens[len(request.binding.prompt) :])
        job = grown(self.job, request.encoding)
        message = self.intake.message(job, tokens, request.author, request.role, Usage.of(request))
        message.chosen, message.label, message.header = tuple(request.chosen), request.label, len(self.job.tokens)
        message = ledger.enter(message, segment)
        for label in self.labels:
            label.put_on(message)
        found = max(0, len(self.prefills.intersection(request.futures)) - 1)
        self.core.count_found(self.job.prompt_tokens() * found)
        for answer in request.futures:
            scope = self.scopes[answer]
            if scope is None or not scope.closed:
                ledger.lease(message, scope)
        ledger.drop_if_unleased(message)
        if self.memo is not None and message.leases:
            ledger.memoise(self.memo, message)
        return message.handle

    def _forget(self) -> None:
        """It is no longer under way."""
        if self.key is not None:
            self.running.pop(self.key, None)
