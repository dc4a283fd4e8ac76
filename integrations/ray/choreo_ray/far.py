"""An engine in an actor, as its front has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from choreo_agents.engine.elsewhere import Copying, Greeted, Greeting, JoiningMessage, SentAnswer, SentCall
from choreo_agents.sampling import Chosen
from choreo_ray.errors import translated


class RayFarEngine:
    """See `FarEngine`.

    Args:
        name: The engine's.
        actor: A handle of an `EngineActor`.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor
        self._incarnation = ""
        """Of the process that was greeted last."""

    async def greet(self, greeting: Greeting) -> Greeted:
        """See `FarEngine`, as all that follow."""
        self._incarnation, greeted = await self._asked(self.actor.greet, greeting)
        return greeted  # type: ignore[no-any-return]

    async def run(self, sent: SentCall) -> AsyncGenerator[Sequence[Chosen] | SentAnswer]:
        stream: Any = None
        try:
            stream = self.actor.run.options(num_returns="streaming").remote(self._incarnation, sent)
            async for reference in stream:
                told = await reference
                if isinstance(told, SentAnswer):
                    stream = None
                yield told
            stream = None
        except RayError as error:
            stream = None
            raise translated(self.name, error) from error
        finally:
            if stream is not None:  # a generator that is dropped goes on in its actor
                ray.cancel(stream)

    async def hurry(self, front: str, number: int, priority: int) -> None:
        await self._told(self.actor.hurry, front, number, priority)

    async def join(self, joining: JoiningMessage) -> None:
        await self._told(self.actor.join, joining)

    async def give(self, copying: Copying) -> Any:
        return await self._told(self.actor.give, copying)

    async def take(self, copying: Copying, given: Any) -> tuple[Collection[str], int]:
        taken: tuple[Collection[str], int] = await self._told(self.actor.take, copying, given)
        return taken

    async def release(self, front: str, salt: str, ids: Collection[str]) -> None:
        await self._told(self.actor.release, front, salt, ids)

    async def close_tenant(self, front: str, salt: str) -> None:
        await self._told(self.actor.close_tenant, front, salt)

    async def _told(self, method: Any, *arguments: Any) -> Any:
        """What the process that was greeted says."""
        return await self._asked(method, self._incarnation, *arguments)

    async def _asked(self, method: Any, *arguments: Any) -> Any:
        try:
            return await method.remote(*arguments)
        except RayError as error:
            raise translated(self.name, error) from error
