"""An engine in an actor, as its router has it."""

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
from choreo_ray.errors import translated
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
"""Seconds in which releases are gathered: they are for the engine's memory, and nobody waits for them."""
_SUSPECTS = 256
_AGAIN_S = 0.1
"""Seconds after which an actor is asked again for what it says, when that has failed."""


class RayEngineClient:
    """See `EngineClient`. Used from one event loop.

    A call is one task of the actor, and its tokens come by a stream that it shares with all others of the router: an
    item of a stream costs as much as a call, and there is one for each step of the engine, not for each token.

    Args:
        name: The engine's.
        actor: A handle of an `EngineActor`.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor
        self._sender = Sender("", "")
        """This router, as the process knows it that was greeted last."""
        self._listening: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Queue[SomeTokens | None]] = {}
        """What was heard of each call under way, by its sequence number; None: it has ended."""
        self._suspects: set[int] = set()
        """Calls of which nothing was heard before the actor died."""
        self._releasing: list[Releasing] = []
        """What the engine is still to be told of."""

    async def greet(self, greeting: Hello) -> HelloReply:
        """See `EngineClient`, as all that follow."""
        await self._asked(self.actor.meet, own_version())  # Ray may have started it again on another machine
        incarnation, greeted = await self._asked(self.actor.greet, greeting)
        if self._listening is not None:
            self._listening.cancel()
        self._sender, self._releasing = Sender(greeting.router, incarnation), []
        self._listening = asyncio.create_task(self._listen(self._sender))
        return greeted  # type: ignore[no-any-return]

    async def load_adapter(self, adapter: SentAdapter) -> None:
        await self._told(self.actor.load_adapter, adapter)

    async def run(self, sent: SentCall) -> AsyncGenerator[Sequence[SampledToken] | SentAnswer]:
        heard = self._calls[sent.sequence_no] = asyncio.Queue()
        answered: asyncio.Future[Any] | None = None
        begun, count = False, 0
        try:
            reference = self._submitted(sent)
            answered = asyncio.wrap_future(reference.future())
            answered.add_done_callback(partial(_ended, heard))
            while (some := await heard.get()) is not None:
                begun = True
                if some.since <= count:  # else some were lost on their way: they come with the answer
                    told = some.tokens[count - some.since :]
                    count += len(told)
                    yield told
            every, answer = answered.result()
            if len(every) > count:
                yield every[count:]
            if isinstance(answer, ChoreoError):
                raise answer
            yield answer
        except RayActorError as error:
            if not begun and self._suspected(sent.number):
                yield ()
            raise translated(self.name, error) from error
        except RayError as error:
            raise translated(self.name, error) from error
        finally:
            del self._calls[sent.sequence_no]
            if answered is not None and not answered.done():
                ray.cancel(reference)

    def _submitted(self, sent: SentCall) -> Any:
        """What comes of a call. Ray's own error tells all that is sent, the tenant's secret included."""
        try:
            return self.actor.run.remote(self._sender, sent)
        except (TypeError, PicklingError):
            constraint = getattr(sent.call, "constraint", None)
            raise InvalidRequestError(
                f"the constraint {constraint and constraint.key!r} cannot be sent to engine {self.name!r}: its make, "
                "and all that it refers to, must be what cloudpickle can copy"
            ) from None

    async def raise_priority(self, router: str, number: int, priority: int) -> None:
        await self._told(self.actor.raise_priority, number, priority)

    async def export_kv(self, copying: Copying) -> Any:
        return await self._told(self.actor.export_kv, copying)

    async def import_kv(self, copying: Copying, given: Any) -> tuple[Collection[str], int]:
        taken: tuple[Collection[str], int] = await self._told(self.actor.import_kv, copying, given)
        return taken

    async def release(self, releasing: Releasing) -> None:
        """Soon, and together with others."""
        self._releasing.append(releasing)
        if len(self._releasing) == 1:
            try:
                await asyncio.sleep(_RELEASE_S)
            except asyncio.CancelledError:  # the router closes, and waits for nothing
                with suppress(RayError):
                    self.actor.release.remote(self._sender, self._gathered())
                raise
            if gathered := self._gathered():  # else the engine has begun anew meanwhile
                await self._told(self.actor.release, gathered)

    async def close_tenant(self, router: str, salt: str, sequence_no: int) -> None:
        await self._told(self.actor.close_tenant, salt, sequence_no)

    def _gathered(self) -> list[Releasing]:
        gathered, self._releasing = self._releasing, []
        return gathered

    def _suspected(self, number: int) -> bool:
        """Whether a call has to be taken for one that ends its engine before it is heard of: not for the first time."""
        known = number in self._suspects
        self._suspects = {*sorted(self._suspects)[-_SUSPECTS:], number}
        return known

    async def _listen(self, sender: Sender) -> None:
        """Hand tokens on to the calls that they are of, until the actor knows nothing of this router any more."""
        while True:
            stream = self.actor.listen.options(num_returns="streaming").remote(sender)
            try:
                async for reference in stream:
                    for sequence_no, some in (await reference).items():
                        if (call := self._calls.get(sequence_no)) is not None:
                            call.put_nowait(some)
            except asyncio.CancelledError:
                ray.cancel(stream)  # one that is merely dropped goes on in its actor
                raise
            except RayError as error:
                with suppress(RayError):
                    ray.cancel(stream)  # else it would take what the next is to hear
                if _is_over(error):
                    return
                LOG.info("what engine %r says is asked for again: %s", self.name, error)
                await asyncio.sleep(_AGAIN_S)

    async def _told(self, method: Any, *arguments: Any) -> Any:
        """What the process that was greeted says."""
        return await self._asked(method, self._sender, *arguments)

    async def _asked(self, method: Any, *arguments: Any) -> Any:
        try:
            return await method.remote(*arguments)
        except RayError as error:
            raise translated(self.name, error) from error


def _ended(heard: asyncio.Queue[SomeTokens | None], answered: asyncio.Future[Any]) -> None:
    """A call has ended; why is told to whoever still waits for it, and else to nobody."""
    if not answered.cancelled():
        answered.exception()
    heard.put_nowait(None)


def _is_over(error: RayError) -> bool:
    """Whether who has failed so says nothing more to a router, unless it is greeted again."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, EngineLostError)
    return isinstance(error, (ActorDiedError, RaySystemError))
