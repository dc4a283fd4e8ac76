"""Actors in this process, asked by handles that are as Ray's, and fail as they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from choreo_ray.actor import EngineActor
from ray import exceptions as ray_errors


class NearbyActor:
    """A handle of an actor that runs in the event loop of whoever asks.

    Args:
        actor: It.
        fails: Is told what is asked for, and raises what Ray does when it fails; None: it never does.
    """

    def __init__(self, actor: EngineActor, fails: Callable[[str], None] | None = None) -> None:
        self.actor, self.fails = actor, fails or (lambda method: None)
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        def remote(*arguments: Any) -> _Reference:
            self.asked.append(name)
            return _Reference(self._answer(name, arguments))

        def stream(*arguments: Any) -> AsyncIterator[Awaitable[Any]]:
            self.asked.append(name)
            return self._items(name, arguments)

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=stream))

    async def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            self.fails(name)
            return await getattr(self.actor, name)(*arguments)
        except ray_errors.RayError:
            raise
        except Exception as cause:
            raise raised(cause) from cause

    async def _items(self, name: str, arguments: tuple[Any, ...]) -> AsyncIterator[Awaitable[Any]]:
        try:
            self.fails(name)
            async for each in getattr(self.actor, name)(*arguments):
                yield _done(each)
        except ray_errors.RayError:
            raise
        except Exception as cause:
            raise raised(cause) from cause


class _Reference:
    """To an answer.

    Args:
        work: What comes to it.
    """

    def __init__(self, work: Any) -> None:
        self._task = asyncio.ensure_future(work)

    def future(self) -> Future[Any]:
        found: Future[Any] = Future()

        def tell(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                found.set_exception(ray_errors.TaskCancelledError())
            elif (error := task.exception()) is not None:
                found.set_exception(error)
            else:
                found.set_result(task.result())

        self._task.add_done_callback(tell)
        return found

    def __await__(self) -> Any:
        return self._task.__await__()


async def _done(item: Any) -> Any:
    return item


def raised(cause: Exception) -> Exception:
    """What Ray raises where an actor has raised something."""
    return ray_errors.RayTaskError("it", "Traceback ...", cause, "actor", 1, "127.0.0.1").as_instanceof_cause()
