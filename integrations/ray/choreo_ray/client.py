"""Client of an engine in a Ray actor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import suppress
from functools import partial
from pickle import PicklingError
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RaySystemError, RayTaskError

from choreo_agents.errors import ChoreoError, EngineLostError, InvalidRequestError
from choreo_agents.sampling import SampledToken
from choreo_ray.actor import Sender, SomeTokens
from choreo_ray.errors import translate
from choreo_ray.remote import (
    Copying,
    Hello,
    HelloReply,
    Releasing,
    SentAdapter,
    SentAnswer,
    SentCall,
)
from choreo_ray.remote.protocol import own_version

LOG = logging.getLogger("choreo_ray")

_RELEASE_S = 0.1
"""Seconds over which releases are gathered: they free the engine's memory, and nobody waits for them."""
_SUSPECTS = 256
_AGAIN_S = 0.1
"""Seconds until `listen` is called again after it has failed."""


class RayEngineClient:
    """Client of an `EngineActor` (see `EngineClient`). Used from one event loop.

    A call is one task of the actor. The tokens of all calls of a router share one stream: an item of a stream costs as
    much as a call, and there is one for each step of the engine, not for each token.

    Args:
        name: Name of the engine.
        actor: Handle of an `EngineActor`.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor
        self._sender = Sender("", "")
        """This router, and the incarnation that was greeted last."""
        self._listening: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Queue[SomeTokens | None]] = {}
        """Tokens received for each call under way, by sequence number; None: the call has ended."""
        self._suspects: set[int] = set()
        """Numbers of requests that sent nothing before the actor died."""
        self._releasing: list[Releasing] = []
        """Releases that are still to be sent."""

    async def greet(self, greeting: Hello) -> HelloReply:
        """See `EngineClient` for this method and those that follow."""
        await self._call(self.actor.meet, own_version())  # Ray may have started it again on another machine
        incarnation, reply = await self._call(self.actor.greet, greeting)
        if self._listening is not None:
            self._listening.cancel()
        self._sender, self._releasing = Sender(greeting.router, incarnation), []
        self._listening = asyncio.create_task(self._listen(self._sender))
        return reply  # type: ignore[no-any-return]

    async def load_adapter(self, adapter: SentAdapter) -> None:
        await self._send(self.actor.load_adapter, adapter)

    async def run(self, sent: SentCall) -> AsyncGenerator[Sequence[SampledToken] | SentAnswer]:
        queue = self._calls[sent.sequence_no] = asyncio.Queue()
        answered: asyncio.Future[Any] | None = None
        begun, count = False, 0
        try:
            reference = self._submit(sent)
            answered = asyncio.wrap_future(reference.future())
            answered.add_done_callback(partial(_on_end, queue))
            while (batch := await queue.get()) is not None:
                begun = True
                if batch.since <= count:  # else some were lost on their way: they come with the answer
                    tokens = batch.tokens[count - batch.since :]
                    count += len(tokens)
                    yield tokens
            all_tokens, answer = answered.result()
            if len(all_tokens) > count:
                yield all_tokens[count:]
            if isinstance(answer, ChoreoError):
                raise answer
            yield answer
        except RayActorError as error:
            if not begun and self._is_suspect(sent.number):
                yield ()
            raise translate(self.name, error) from error
        except RayError as error:
            raise translate(self.name, error) from error
        finally:
            del self._calls[sent.sequence_no]
            if answered is not None and not answered.done():
                ray.cancel(reference)

    def _submit(self, sent: SentCall) -> Any:
        """Submit a call. Replaces Ray's own error, which shows all that is sent, the tenant's secret included."""
        try:
            return self.actor.run.remote(self._sender, sent)
        except (TypeError, PicklingError):
            constraint = getattr(sent.call, "constraint", None)
            raise InvalidRequestError(
                f"the constraint {constraint and constraint.key!r} cannot be sent to engine {self.name!r}: its `make` "
                "and all that it refers to must be picklable by cloudpickle"
            ) from None

    async def raise_priority(self, router: str, number: int, priority: int) -> None:
        await self._send(self.actor.raise_priority, number, priority)

    async def export_kv(self, copying: Copying) -> Any:
        return await self._send(self.actor.export_kv, copying)

    async def import_kv(self, copying: Copying, exported: Any) -> tuple[Collection[str], int]:
        return await self._send(self.actor.import_kv, copying, exported)  # type: ignore[no-any-return]

    async def release(self, releasing: Releasing) -> None:
        """Release messages soon, together with others."""
        self._releasing.append(releasing)
        if len(self._releasing) == 1:
            try:
                await asyncio.sleep(_RELEASE_S)
            except asyncio.CancelledError:  # the router is closing, and does not wait
                with suppress(RayError):
                    self.actor.release.remote(self._sender, self._take_releases())
                raise
            if releases := self._take_releases():  # else the actor has restarted meanwhile
                await self._send(self.actor.release, releases)

    async def close_tenant(self, router: str, salt: str, sequence_no: int) -> None:
        await self._send(self.actor.close_tenant, salt, sequence_no)

    def _take_releases(self) -> list[Releasing]:
        releases, self._releasing = self._releasing, []
        return releases

    def _is_suspect(self, number: int) -> bool:
        """Return whether a call has already once ended its actor before it began, and remember it."""
        is_repeated = number in self._suspects
        self._suspects = {*sorted(self._suspects)[-_SUSPECTS:], number}
        return is_repeated

    async def _listen(self, sender: Sender) -> None:
        """Hand tokens to the calls that they belong to, until the actor no longer knows this router."""
        while True:
            stream = self.actor.listen.options(num_returns="streaming").remote(sender)
            try:
                async for reference in stream:
                    for sequence_no, batch in (await reference).items():
                        if (queue := self._calls.get(sequence_no)) is not None:
                            queue.put_nowait(batch)
            except asyncio.CancelledError:
                ray.cancel(stream)  # a stream that is merely dropped goes on in its actor
                raise
            except RayError as error:
                with suppress(RayError):
                    ray.cancel(stream)  # else it would take tokens from the next stream
                if _is_over(error):
                    return
                LOG.info("events of engine %r are requested again: %s", self.name, error)
                await asyncio.sleep(_AGAIN_S)

    async def _send(self, method: Any, *arguments: Any) -> Any:
        """Call a method of the process that was greeted."""
        return await self._call(method, self._sender, *arguments)

    async def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            return await method.remote(*arguments)
        except RayError as error:
            raise translate(self.name, error) from error


def _on_end(queue: asyncio.Queue[SomeTokens | None], answered: asyncio.Future[Any]) -> None:
    """Mark a call as ended, and its error as retrieved, since asyncio logs errors that nobody retrieves."""
    if not answered.cancelled():
        answered.exception()
    queue.put_nowait(None)


def _is_over(error: RayError) -> bool:
    """Return whether the actor sends this router nothing more after an error, unless it is greeted again."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, EngineLostError)
    return isinstance(error, (ActorDiedError, RaySystemError))
