"""Messages under way: who waits for one, and what becomes of it when its request has ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.messages.entering import entering
from choreo_agents.engine.messages.labels import Label
from choreo_agents.engine.messages.message import Lineage, Message
from choreo_agents.engine.messages.naming import Naming
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.engine.messages.usage import Usage
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.runtime.request import Encoding, Request
from choreo_agents.sampling import Chosen

Answer = Future[MessageHandle]
OnToken = Callable[[Chosen], None]


@dataclass(eq=False)
class Pending:
    """A message that a request will be: owns the request (see `Owner`)."""

    core: EngineCore
    naming: Naming
    lineage: Lineage
    encoding: Encoding
    encodes_end: bool
    memo: str | None
    """Under which its answer is remembered."""
    running: dict[str, Request]
    """Where the same call finds the request while it is under way, by `name`."""
    name: str | None
    placed: Any = None
    """The call, for whoever has it run elsewhere."""
    scopes: dict[Answer, Scope | None] = field(default_factory=dict)
    """Who waits for it, and under which leases."""
    labels: list[Label] = field(default_factory=list)
    """What those who wait say about the message."""
    prefills: set[Answer] = field(default_factory=set)
    """Those who asked for it to be encoded now: all but one of them have found it."""

    def awaited(
        self,
        request: Request,
        scope: Scope | None,
        said: Label,
        *,
        prefilled: bool = False,
        deadline: float | None = None,
        on_token: OnToken | None = None,
    ) -> Answer:
        """Somebody more waits for it.

        Args:
            request: Its request.
            scope: Which takes the lease.
            said: What this one says of the message.
            prefilled: Whether it was asked for to be encoded now.
            deadline: When this one gives up, as `time.perf_counter` counts.
            on_token: Told of every token, also of those that were sampled before.
        """
        answer: Answer = Future()
        request.futures.append(answer)
        self.scopes[answer] = scope
        self.labels.append(said)
        if prefilled:
            self.prefills.add(answer)
        if deadline is not None:
            request.deadlines[answer] = deadline
        if on_token is not None:
            for chosen in request.chosen:
                on_token(chosen)
            request.listeners.append(on_token)
        return answer

    def finish(self, request: Request) -> MessageHandle:
        """Make a message of the finished request, with a lease for everyone who waits for it: all or nothing."""
        self._forget()
        core, made = self.core, self._made(request)
        request.encoding.close(request)
        # From here on the table sees to the segment.
        with entering(core.table, made, request.hand_over()) as message:
            for label in self.labels:
                label.put_on(message)
            scopes = [self.scopes[answer] for answer in request.futures]
            open_scopes = [scope for scope in scopes if scope is None or not scope.closed]
            for scope in open_scopes:
                core.table.lease(message, scope)
            if self.memo is not None and message.leases:
                core.table.memos.remember(self.memo, message, next(iter(open_scopes), None))
            found = max(0, len(self.prefills.intersection(request.futures)) - 1)
            core.count_found(self.lineage.prompt_tokens() * found, self.lineage.tenant)
        return message.handle

    def abandon(self, request: Request) -> None:
        """Give back all that an unfinished request holds."""
        self._forget()
        try:
            request.encoding.close(request)
            segment = request.hand_over()
            if segment is not None:
                self.core.pool.unpin(segment)
        finally:
            # A model's own samplers may fail at it: what the engine holds is given back before.
            if request.decoding is not None:
                request.decoding.sampler.withdraw()

    def _made(self, request: Request) -> Message:
        """The message that a finished request is."""
        assert request.binding is not None
        tokens = self.lineage.tokens + tuple(request.tokens[len(request.binding.prompt) :])
        lineage = replace(self.lineage, tokens=tokens)
        return Message(
            self.naming.handle(lineage),
            lineage,
            request.author,
            request.role,
            Usage.of(request),
            request.label,
            self.labels[0].origin(request.label),
            None if request.decoding is None else tuple(request.chosen),
            header=len(self.lineage.tokens),
            finish_reason=None if request.decoding is None else request.decoding.finish_reason,
        )

    def _forget(self) -> None:
        """It is no longer under way."""
        if self.name is not None:
            self.running.pop(self.name, None)
