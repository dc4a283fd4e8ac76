"""Messages under way: what was asked, who waits for one, and what becomes of it when its request has ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from choreo_agents.engine.calls import Decode, Prefill
from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.decoding.leading import LedAnswer
from choreo_agents.engine.messages.entering import entering
from choreo_agents.engine.messages.message import Label, Lineage, Message
from choreo_agents.engine.messages.naming import Naming
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.engine.messages.usage import Usage
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.runtime.request import Request
from choreo_agents.sampling import Chosen

Answer = Future[MessageHandle]
OnToken = Callable[[Chosen], None]


@dataclass(frozen=True)
class ReadCall:
    """A call whose texts are tokens."""

    call: Prefill | Decode
    tokens: tuple[int, ...]
    closing: tuple[int, ...]
    sample: int = 0
    """Which of the answers that the call asks for this is."""
    stops: frozenset[int] = frozenset()
    """Tokens after which a decode ends."""
    over: frozenset[int] = frozenset()
    """These, and the one of its closing that tells that the message is over, if there is any."""
    led: LedAnswer | None = None
    """What leads its answers; None: nothing."""
    left_out: frozenset[int] = frozenset()
    """See `Decoding`."""
    closes: frozenset[int] = frozenset()
    """See `Decoding`."""
    thoughts: int = 0
    """Tokens that thoughts and what closes them can take."""

    @property
    def longest(self) -> int:
        """Tokens that it can add to these at most."""
        if isinstance(self.call, Prefill):
            return 0
        sampled = self.call.sampling.longest if self.led is None else self.led.longest
        thought = self.thoughts if self.call.sampling.forced is None else 0
        return sampled + thought + len(self.closing)


@dataclass(frozen=True, eq=False)
class PlacedCall:
    """A call whose parents are found and placed."""

    read: ReadCall
    lineage: Lineage
    said: Label
    """What it says of its message."""
    name: str | None
    """What the same call is found by: of a prefill, the id of the message that it makes; of a decode, under what its
    answer is remembered."""


@dataclass(eq=False)
class Pending:
    """A message that a request will be: owns the request (see `Owner`)."""

    core: EngineCore
    naming: Naming
    placed: PlacedCall
    """The call that was made first."""
    encodes_end: bool
    running: dict[str, Request]
    """Where the same call finds the request while it is under way, by its name."""
    scopes: dict[Answer, Scope | None] = field(default_factory=dict)
    """Who waits for it, and under which leases."""
    labels: list[Label] = field(default_factory=list)
    """What those who wait say about the message."""
    prefills: set[Answer] = field(default_factory=set)
    """Those who asked for it to be encoded now: all but one of them have found it."""

    def awaited(
        self, request: Request, placed: PlacedCall, scope: Scope | None, until: float | None, on_token: OnToken | None
    ) -> Answer:
        """Somebody more waits for it.

        Args:
            request: Its request.
            placed: The call of this one.
            scope: Which takes the lease.
            until: When this one gives up, as `time.perf_counter` counts.
            on_token: Told of every token, also of those that were sampled before.
        """
        answer: Answer = Future()
        request.futures.append(answer)
        self.scopes[answer] = scope
        self.labels.append(placed.said)
        if isinstance(placed.read.call, Prefill) and not placed.read.call.lazy:
            self.prefills.add(answer)
        if until is not None:
            request.deadlines[answer] = until
        if on_token is not None:
            for chosen in request.chosen:
                on_token(chosen)
            request.listeners.append(on_token)
        return answer

    def finish(self, request: Request) -> MessageHandle:
        """Make a message of the finished request, with a lease for everyone who waits for it: all or nothing."""
        self._forget()
        core, lineage, made = self.core, self.placed.lineage, self._made(request)
        request.encoding.close(request)
        # From here on the table sees to the segment.
        with entering(core.table, made, request.hand_over()) as message:
            for label in self.labels:
                label.put_on(message)
            scopes = [self.scopes[answer] for answer in request.futures]
            open_scopes = [scope for scope in scopes if scope is None or not scope.closed]
            for scope in open_scopes:
                core.table.lease(message, scope)
            if request.decoding is not None and self.placed.name is not None and message.leases:
                core.table.memos.remember(self.placed.name, message, next(iter(open_scopes), None))
            found = max(0, len(self.prefills.intersection(request.futures)) - 1)
            # Of prefills that found their message on its way for another call.
            core.counters.add(lineage.tenant, "tokens_reused", lineage.prompt_tokens() * found)
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
        given = self.placed.lineage.tokens
        lineage = replace(self.placed.lineage, tokens=given + tuple(request.tokens[len(request.binding.prompt) :]))
        return Message(
            self.naming.handle(lineage),
            lineage,
            request.author,
            request.role,
            Usage.of(request),
            request.label,
            self.labels[0].origin(request.label),
            None if request.decoding is None else tuple(request.chosen),
            header=len(given),
            finish_reason=None if request.decoding is None else request.decoding.finish_reason,
        )

    def _forget(self) -> None:
        """It is no longer under way."""
        if self.placed.name is not None:
            self.running.pop(self.placed.name, None)
