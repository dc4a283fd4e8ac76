"""A tenant: its calls are answered by what is known or under way, or have a request made. And all tenants together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from choreo_agents.engine.adapters import read_loaded
from choreo_agents.engine.calls import Calls, Prefill
from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.keeping.kept import kept_of
from choreo_agents.engine.messages.message import Message, Naming, Scope, Usage
from choreo_agents.engine.rate_limit import RateLimiter
from choreo_agents.engine.request_builder import Answer, OnToken, Pending, PlacedCall, RequestBuilder
from choreo_agents.engine.stock import EngineStats, LeasedMemory, MemoryMap, leased_memory, memory_map_of, stats_of
from choreo_agents.errors import EngineClosedError, InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.segment import Segment
from choreo_agents.runtime.request import Request

T = TypeVar("T")


class Tenant:
    """The calls of one tenant: no other's message is found here, nor found again as one of its own.

    Every public method may be called from any thread.
    """

    def __init__(self, core: EngineCore, salt: str) -> None:
        self.core = core
        self.naming = Naming(salt, core.model.adapter.fingerprint, core.secret)
        self.name = self.naming.tenant
        """Does not tell the salt."""
        self.builder = RequestBuilder(core, self.naming)
        self.scopes = object()
        """Names its scopes in every context, and is nobody else's when it is gone."""
        self.limiter = RateLimiter()
        """Keeps the rate at which its calls start."""
        self.closing = self.closed = False
        """Whether the tenancy is being ended, and whether it has ended."""
        self.kept = kept_of(core, self.naming, self.builder.find)
        """Has what outlives the engine; None: nothing does."""
        self._keepers: dict[Callable[..., object], Any] = {}
        """What keeps messages for it, by what made it."""

    def require_open(self) -> None:
        """Raise `EngineClosedError` once the tenancy has ended, or the engine was closed."""
        self.require_tenancy()
        self.core.loop.require_open()

    def close(self) -> None:
        """End the tenancy: write what is to be kept, fail unfinished calls, drop leases and all that only it holds."""
        core = self.core
        self.stop()
        with core.lock:
            if self.closed:
                return
            self.closed = True
            loop = core.loop
        loop.drop_tenant(self.name)
        with core.lock:
            self._keepers.clear()
            core.kept.pop(self.name, None)
            parts: Any = (core.table, core.holdings, core.method, core.adapters, core.counters, core.movements)
            for part in parts:
                part.drop_tenant(self.name)

    def stop(self) -> None:
        """Let none of its calls start, and write what is to be kept."""
        self.limiter.close()
        if self.kept is not None:
            self.kept.close()

    def load_adapter(self, folder: str | Path, name: str | None) -> str:
        """See `Engine.load_adapter`."""
        core = self.core
        self.require_tenancy()
        loaded = read_loaded(core.model.adapter, folder)
        with core.lock:
            self.require_tenancy()  # the file took its time
            name = core.adapters.require_free(loaded, name, self.name)
        core.execution.load_adapter(core, loaded.folder, name, self.naming)
        with core.lock:
            return core.adapters.add(loaded, name, self.name)

    def adapters(self) -> tuple[str, ...]:
        """The names that its calls can use."""
        with self.core.lock:
            self.require_tenancy()
            return tuple(self.core.adapters.folders(self.name))

    def keeper(self, make: Callable[..., T], *args: Any) -> T:
        """What `make` makes, once: see `KVTransfer.keeper`."""
        with self.core.lock:
            self.require_tenancy()
            if make not in self._keepers:
                self._keepers[make] = make(*args)
            return cast(T, self._keepers[make])

    def submit(
        self,
        calls: Calls,
        scope: Scope | None,
        started: float | None = None,
        on_token: OnToken | None = None,
    ) -> list[Answer]:
        """Check all calls, then start them as one batch; nothing is done if one of them is wrong.

        Args:
            calls: What to encode, or to decode: with as many answers to each as its sampling asks for.
            scope: Which takes the leases.
            started: When the calls were made, as `time.perf_counter` counts; None: now.
            on_token: Called with every sampled token, on the engine's thread; must not raise.
        """
        answers, requests = list[Answer](), list[Request]()
        began = time.perf_counter() if started is None else started

        def answer(placed: PlacedCall) -> Answer:
            """To a call that is known already or under way, or that has a new request in this batch."""
            call = placed.read.call
            if isinstance(call, Prefill):
                known = _prefilled(self, placed, call)
            else:  # the answer that the same decode was given before
                known = None if placed.name is None or call.anew else self.core.table.memos.get(placed.name)
                if known is not None and on_token is not None:
                    for chosen in known.chosen or ():
                        on_token(chosen)
            if known is not None:
                return self.answered(known, placed, scope)
            request = None if placed.name is None else self.builder.running.get(placed.name)
            if request is None or request.over:
                request = self.builder.request(placed)
                requests.append(request)
                undo.callback(request.owner.abandon, request)
            pending = request.owner
            assert isinstance(pending, Pending)
            if request in requests:
                request.priority = max(request.priority, call.priority)
            else:
                self.core.loop.hurry(request, call.priority)
            deadline = None if call.timeout_s is None else began + call.timeout_s
            return pending.awaited(request, placed, scope, deadline, on_token)

        read = [each for call in calls for each in self.builder.read(call)]
        with self.core.lock:
            self.require_open()
            placed = [self.builder.place(each) for each in read]
            # If it cannot be submitted whole, all of it is given back: nobody may join what will never run.
            with self.given_up_if_left(answers, scope), ExitStack() as undo:
                for each in placed:
                    answers.append(answer(each))
                self.core.loop.submit(requests)
                undo.pop_all()
            return answers

    def find(self, handle: MessageHandle) -> Message:
        """The message of a leased handle; raises a `HandleError` otherwise."""
        with self.core.lock:
            self.require_tenancy()
            return self.builder.find(handle)

    def release(self, handle: MessageHandle, scope: Scope | None, *, spare_only: bool) -> None:
        """Drop one lease; with `spare_only`, unless it is the last that does not end with another's scope."""
        with self.core.lock:
            message = self.find(handle)
            if not spare_only or message.leases_within(scope) > 1:
                self.core.table.release(message, scope)

    @contextmanager
    def given_up_if_left(self, answers: Sequence[Answer], scope: Scope | None) -> Iterator[None]:
        """Cancel answers, or return the leases that came with them, if the block is left by an error."""
        try:
            yield
        except BaseException:
            for answer in answers:
                if not answer.cancel():
                    answer.add_done_callback(lambda done: self._return_lease(done, scope))
            raise

    def require_tenancy(self) -> None:
        """Raise `EngineClosedError` once the tenancy has ended."""
        if self.closed:
            raise EngineClosedError("this tenancy was closed: begin another with tenant()")

    def _return_lease(self, answer: Answer, scope: Scope | None) -> None:
        given = not answer.cancelled() and answer.exception() is None
        if given and not self.closed and not (scope is not None and scope.closed):
            self.release(answer.result(), scope, spare_only=False)

    def answered(
        self, message: Message, placed: PlacedCall, scope: Scope | None, segment: Segment | None = None
    ) -> Answer:
        """A call's answer that is there, with a lease; all or nothing.

        Args:
            message: New or known.
            placed: The call.
            scope: Which takes the lease.
            segment: The message's KV, if it was encoded elsewhere; its pin is taken over in any case.
        """
        table = self.core.table
        with table.entering(message, segment) as entered:
            placed.said.put_on(entered)
            if scope is None or not scope.closed:
                table.lease(entered, scope)
        answer: Answer = Future()
        answer.set_result(message.handle)
        return answer


def _prefilled(tenant: Tenant, placed: PlacedCall, call: Prefill) -> Message | None:
    """The message that a prefill finds, or that need not be encoded now; None: a request has to make it."""
    core, lineage = tenant.core, placed.lineage
    assert placed.name is not None
    known = core.table.get(placed.name)
    if known is not None and (call.lazy or known.promise is None):
        if core.method.keeps_kv and not call.lazy:
            core.counters.add(tenant.name, "tokens_reused", lineage.prompt_tokens())
        return known
    waits = not lineage.mapper and placed.name not in tenant.builder.running
    has_file = waits and known is None and tenant.kept is not None and tenant.kept.knows(placed.name)
    if core.method.keeps_kv and not (waits and (call.lazy or has_file)):
        return None
    if has_file and not call.lazy:
        core.counters.add(tenant.name, "tokens_reused", lineage.prompt_tokens())
    if lineage.mapper:
        return lineage.parents[0]
    # It stays text, has a file, or whoever reads it first has it encoded.
    keeps = core.method.keeps_kv
    label = lineage.label(call.author, call.role, placed.said.source) if keeps else ""
    return Message(
        tenant.naming.handle(lineage),
        lineage,
        call.author,
        call.role,
        Usage.found(0),
        label,
        placed.said.origin(label),
        header=len(lineage.tokens) if keeps else 0,
        promise=core.next_number() if keeps and not has_file else None,
        again=call.again,
    )


class EngineOwner:
    """All tenants' engine: `engine.owner`, of the engine that `Engine.load` returns. May be used from any thread.

    Args:
        core: Serves them.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._open: dict[str, Tenant] = {}
        """By salt."""
        self._closed = core.lock.condition()

    def open(self, salt: str, calls_per_second: float | None = None) -> Tenant:
        """Return the tenant with this salt; for `calls_per_second` see `Engine.tenant`.

        One that is being closed comes again when that is over, and finds nothing of before.

        Raises:
            InvalidRequestError: The rate is not above 0.
            EngineClosedError: It is being closed, and this is the engine's thread, for which that waits.
        """
        if not isinstance(salt, str):
            raise InvalidRequestError(f"a salt must be a text, not {salt!r}")
        # Folders are made and looked into without the lock.
        made = None if salt in self._open else Tenant(self.core, salt)
        with self.core.lock:
            while (tenant := self._open.get(salt)) is not None and tenant.closing:
                if self.core.loop.is_here:
                    raise EngineClosedError("this tenancy is being closed: begin it again when that is over")
                self._closed.wait()
            tenant = tenant or made or Tenant(self.core, salt)
            if calls_per_second is not None:
                tenant.limiter.set_rate(calls_per_second)
            if tenant.kept is not None and tenant.kept.store is not None:
                self.core.kept[tenant.name] = tenant.kept.store
            self._open[salt] = tenant
            return tenant

    def close_tenant(self, tenant: Tenant) -> None:
        """End a tenancy: see `Engine.close`."""
        with self.core.lock:
            if tenant.closing:
                if not self.core.loop.is_here:
                    self._closed.wait_for(lambda: tenant not in self._open.values())
                return
            tenant.closing = True
        try:
            tenant.close()  # waits for the engine's thread, which may be opening another
        finally:
            with self.core.lock:
                self._open = {salt: each for salt, each in self._open.items() if each is not tenant}
                self._closed.notify_all()

    def tenants(self) -> Mapping[str, LeasedMemory]:
        """What every open tenant leases: by a name that does not tell its salt, and that folders of its files have."""
        with self.core.lock:
            self.core.cache.files.arrive_all()
            held = leased_memory(self.core.table.messages(), lambda message: message.tenant, self.core.cache)
            return {each.name: held.get(each.name, LeasedMemory()) for each in self._open.values()}

    def stats(self) -> EngineStats:
        """What the engine holds now and has done so far, for all tenants together."""
        return stats_of(self.core)

    def memory_map(self) -> MemoryMap:
        """How much is in each tier, and which authors keep it there, those of all tenants together."""
        return memory_map_of(self.core)

    def restart(self) -> None:
        """Start again with empty memory; unfinished calls fail with `EngineClosedError`.

        Also after a failure that has ended its thread. Handles stay good: what is read again is computed again.

        Raises:
            EngineClosedError: The engine was closed, and stays so.
        """
        self.core.restart()

    def close(self) -> None:
        """Write what is to be kept, and stop the engine for all tenants; unfinished calls fail with
        `EngineClosedError`."""
        if self.core.lock.is_the_parents:
            return
        for tenant in [*self._open.values()]:
            tenant.stop()
        self.core.close()
