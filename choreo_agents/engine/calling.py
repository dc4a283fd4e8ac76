"""Prefill and decode: one call or a batch, sync, async and streaming."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Self, TypeVar, overload

from choreo_agents.engine.calls import Content, Decode, Prefill, StreamedToken
from choreo_agents.engine.desk import Answer, Desk
from choreo_agents.engine.joining import Joining
from choreo_agents.engine.scope import Scope, current
from choreo_agents.engine.streams import stream_async, stream_sync
from choreo_agents.engine.turns import LoopTurns
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.sampling import Sampling

T = TypeVar("T")


class Calling:
    """The calls of an engine: every sync one waits for what its async form does."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._turn = LoopTurns()

    def keep(self, make: Callable[[Self], T]) -> T:
        """What `make` makes of the engine: once for this tenant, and kept as long as the engine is.

        Args:
            make: A function or class; the same one finds the same again. Called under the engine's lock.
        """
        core, key = self._desk.core, (self._desk.tenant, make)
        with core.lock:
            if key not in core.kept:
                core.kept[key] = make(self)
            kept: T = core.kept[key]
            return kept

    @overload
    async def aprefill(
        self,
        content: Content,
        parents: Sequence[MessageHandle] = (),
        offsets: Sequence[int | None] | None = None,
        new_offset: int | None = None,
        *,
        author: str | None = None,
        role: str | None = None,
        confidential: bool = False,
        source: MessageHandle | None = None,
        adapter: str | None = None,
        lazy: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> MessageHandle: ...

    @overload
    async def aprefill(self, content: Sequence[Prefill]) -> list[MessageHandle]: ...

    async def aprefill(self, content: Any, *args: Any, **options: Any) -> Any:
        """See `prefill`. Cancelling the awaiting task stops the request and frees its memory."""
        calls, one = _calls(Prefill, content, args, options)
        scope, started = self._scope(), await self._aenter(calls)
        return await self._await(self._desk.submit_prefills(calls, scope, started), scope, one=one)

    @overload
    def prefill(
        self,
        content: Content,
        parents: Sequence[MessageHandle] = (),
        offsets: Sequence[int | None] | None = None,
        new_offset: int | None = None,
        *,
        author: str | None = None,
        role: str | None = None,
        confidential: bool = False,
        source: MessageHandle | None = None,
        adapter: str | None = None,
        lazy: bool = False,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> MessageHandle: ...

    @overload
    def prefill(self, content: Sequence[Prefill]) -> list[MessageHandle]: ...

    def prefill(self, content: Any, *args: Any, **options: Any) -> Any:
        """Encode given tokens as a message (Prompt Choreography, section 2.3).

        Args:
            content: Text (tokenized without adding anything), token ids, or a list of `Prefill`, which is run as one
                batch and gives a list.
            parents: Messages it attends to, in order.
            offsets: The position of each parent; None, or None for one of them: right after the parent before.
            new_offset: The position of the new message; None: after the last parent.
            author: Who says it, and `role` as what: for traces and audits.
            confidential: Marks the message for audits.
            source: The message whose words these are, if they are encoded again: audits follow it.
            adapter: The name of the adapter that encodes it; None: the engine's own, `"base"`: the model alone.
            lazy: Do not wait: unless it is under way already, it is encoded when it is first read, with what reads it.
            priority: Calls with a higher one come first.
            timeout_s: Seconds after which the call fails; None: never.

        Returns:
            A leased handle. The same content encoded in the same place again costs nothing.

        Raises:
            InvalidRequestError: Empty content, no token, wrong offsets; `ContextLengthError` and `KVBudgetError` if it
                can never fit. Nothing is encoded then.
            HandleError: A parent is unknown, released, or another model's.
            CapacityError: Pinned messages leave no room now.
            RequestTimeoutError: It took longer than `timeout_s`.
        """
        calls, one = _calls(Prefill, content, args, options)
        scope, started = self._scope(), self._enter(calls)
        return self._wait(self._desk.submit_prefills(calls, scope, started), scope, one=one)

    @overload
    async def adecode(
        self,
        header: Content,
        parents: Sequence[MessageHandle] = (),
        offsets: Sequence[int | None] | None = None,
        new_offset: int | None = None,
        *,
        sampling: Sampling = ...,
        author: str | None = None,
        confidential: bool = False,
        closing: Content = (),
        memo: str | None = None,
        joining: Joining | None = None,
        adapter: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> MessageHandle: ...

    @overload
    async def adecode(self, header: Sequence[Decode]) -> list[MessageHandle]: ...

    async def adecode(self, header: Any, *args: Any, **options: Any) -> Any:
        """See `decode`. Cancelling the awaiting task stops the request and frees its memory."""
        calls, one = _calls(Decode, header, args, options)
        scope, started = self._scope(), await self._aenter(calls)
        return await self._await(self._desk.submit_decodes(calls, scope, started), scope, one=one)

    @overload
    def decode(
        self,
        header: Content,
        parents: Sequence[MessageHandle] = (),
        offsets: Sequence[int | None] | None = None,
        new_offset: int | None = None,
        *,
        sampling: Sampling = ...,
        author: str | None = None,
        confidential: bool = False,
        closing: Content = (),
        memo: str | None = None,
        joining: Joining | None = None,
        adapter: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> MessageHandle: ...

    @overload
    def decode(self, header: Sequence[Decode]) -> list[MessageHandle]: ...

    def decode(self, header: Any, *args: Any, **options: Any) -> Any:
        """Generate a message that starts with `header` (Prompt Choreography, section 2.3).

        Args:
            header: Text or token ids, not empty; or a list of `Decode`, which is run as one batch and gives a list.
            parents: Messages it attends to, in order; `offsets` and `new_offset` as for `prefill`.
            sampling: How tokens are chosen and when to stop.
            author: Who says it; `confidential` as for `prefill`.
            closing: What the message must end with (see `Decode`).
            memo: Names this very call, so that repeating it returns the first answer (see `Decode`).
            joining: Through which messages come into its view while it is under way (see `Engine.joining`).
            adapter: As for `prefill`.
            priority: Calls with a higher one come first; `timeout_s` as for `prefill`.

        Returns:
            A leased handle; `text` and `tokens` give what was generated. A batch gives as many for each call as its
            sampling's `n`, one after the other.

        Raises:
            See `prefill`.
        """
        calls, one = _calls(Decode, header, args, options)
        scope, started = self._scope(), self._enter(calls)
        return self._wait(self._desk.submit_decodes(calls, scope, started), scope, one=one)

    def astream(self, header: Content, *args: Any, **options: Any) -> AsyncGenerator[StreamedToken | MessageHandle]:
        """Decode one message, yielding each token as it comes and the handle last. Arguments as for `decode`.

        Leaving the loop early cancels the decode.
        """
        [call] = _one(Decode(header, *args, **options))
        return stream_async(self._desk, call, self._scope(), self._aenter)

    def stream(self, header: Content, *args: Any, **options: Any) -> Iterator[StreamedToken | MessageHandle]:
        """The sync form of `astream`."""
        [call] = _one(Decode(header, *args, **options))
        return stream_sync(self._desk, call, self._scope(), self._enter)

    def _scope(self) -> Scope | None:
        return current(id(self._desk))

    def _enter(self, calls: Sequence[Prefill | Decode]) -> float:
        """Wait until calls may start; when they were made, as `time.perf_counter` counts."""
        made = time.perf_counter()
        if self._desk.gate is not None:
            self._desk.gate.enter(calls).result()
        return made

    async def _aenter(self, calls: Sequence[Prefill | Decode]) -> float:
        made = time.perf_counter()
        if self._desk.gate is not None:
            await asyncio.wrap_future(self._desk.gate.enter(calls))
        return made

    def _wait(self, answers: list[Answer], scope: Scope | None, *, one: bool) -> Any:
        with self._desk.given_up_if_left(answers, scope):
            handles = [answer.result() for answer in answers]
        return handles[0] if one else handles

    async def _await(self, answers: list[Answer], scope: Scope | None, *, one: bool) -> Any:
        with self._desk.given_up_if_left(answers, scope):
            if all(answer.done() for answer in answers):
                # Not a turn of the event loop for each: an agent whose view is there begins before the next is read.
                await self._turn.given()
                handles = [answer.result() for answer in answers]
            else:
                handles = [await asyncio.wrap_future(answer) for answer in answers]
        return handles[0] if one else handles


def _calls(kind: type, content: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Any], bool]:
    """The calls of a batch, or the one that the arguments spell out; and whether it is one."""
    calls = content if isinstance(content, list | tuple) else []
    if not any(isinstance(call, Prefill | Decode) for call in calls):
        return _one(kind(content, *args, **options)), True
    if args or options:
        raise InvalidRequestError(f"a batch of {kind.__name__} calls takes no other arguments: give them to each call")
    for call in calls:
        if not isinstance(call, kind):
            raise InvalidRequestError(f"a batch holds {kind.__name__} calls only, not {call!r}")
    return list(calls), False


def _one(call: Prefill | Decode) -> list[Any]:
    """A call whose answer is one message."""
    if isinstance(call, Decode) and isinstance(call.sampling, Sampling) and call.sampling.n > 1:
        raise InvalidRequestError(
            f"{call.sampling.n} answers come as a list: pass the call in one, decode([Decode(...)])"
        )
    return [call]
