"""A directory of who has what, in actors: for several fronts over the same engines."""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from choreo_agents.engine.elsewhere import HandleDirectory, KnownHolders
from choreo_agents.errors import InvalidRequestError
from choreo_ray.naming import found_or_made, require_name, shard_name

NAMESPACE = "choreo"
ANSWER_S, _REST_S = 0.2, 1.0
"""Seconds in which a shard answers; and how long one that did not is not asked again."""


class DirectoryActor:
    """One shard, in a process of its own. See `HandleDirectory`."""

    def __init__(self) -> None:
        self._directory = HandleDirectory()

    async def there(self) -> int:
        """The process, once it has begun."""
        return os.getpid()

    async def report(self, front: str, engine: str, added: Collection[str], removed: Collection[str]) -> str:
        return self._directory.report(front, engine, added, removed)

    async def holders(self, front: str, ids: Collection[str]) -> KnownHolders:
        return self._directory.holders(front, ids)

    async def lost(self, engine: str) -> None:
        self._directory.lost(engine)

    async def gone(self, front: str) -> None:
        self._directory.gone(front)

    async def close(self) -> None:
        """There is nothing to keep."""


class RayDirectory:
    """See `Directory`: a message is in the shard that its id says. Used from one event loop.

    A shard that does not answer knows nothing, for a while; Ray starts one that has died again, empty. Once it answers
    again the incarnation is another: whoever sees that reports all that engines have for it.

    Args:
        shards: Handles of `DirectoryActor`s, for all fronts in the same order.
    """

    def __init__(self, shards: Sequence[Any]) -> None:
        self.shards = [_Shard(each) for each in shards]
        self.made: list[Any] = []
        """Those of its actors that `start` has not found."""
        self._standings: dict[str, list[_Standing]] = {}
        """Of each front, with each shard."""

    @classmethod
    def start(
        cls, shards: int = 1, *, name: str | None = None, namespace: str = NAMESPACE, num_cpus: float = 0
    ) -> RayDirectory:
        """Start its actors on the cluster that this process uses, or find those of a name.

        Args:
            shards: How many.
            name: They outlive this process, and others find them by it; None: they end with it. `namespace`: Ray's.
            num_cpus: That Ray sets aside for each.
        """
        if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
            raise InvalidRequestError(f"shards must be a whole number, at least 1, not {shards!r}")
        require_name(name, namespace)
        options = {"num_cpus": num_cpus, "max_restarts": -1, "max_task_retries": 0}
        names = (None if name is None else shard_name(name, number) for number in range(shards))
        found = [found_or_made(DirectoryActor, options, each, namespace) for each in names]
        directory = cls([actor for actor, _ in found])
        directory.made = [actor for actor, made in found if made]
        return directory

    async def report(self, front: str, engine: str, added: Collection[str], removed: Collection[str]) -> str:
        """See `Directory`, as all that follow. All shards are told, if only that the front is there."""
        came, went = self._by_shard(added), self._by_shard(removed)
        numbers = range(len(self.shards))
        told = await asyncio.gather(
            *(self.shards[each].asked("report", front, engine, came[each], went[each]) for each in numbers)
        )
        for standing, each in zip(self._standing(front), told, strict=True):
            standing.missed = standing.missed or each is None
            standing.answered(each)
        return self._incarnation(front)

    async def holders(self, front: str, ids: Collection[str]) -> KnownHolders:
        by_shard = self._by_shard(ids)
        told = await asyncio.gather(*(self.shards[each].asked("holders", front, by_shard[each]) for each in by_shard))
        holders: dict[str, Sequence[str]] = {}
        for number, known in zip(by_shard, told, strict=True):
            if known is not None:
                self._standing(front)[number].answered(known.incarnation)
                holders |= known.holders
        return KnownHolders(self._incarnation(front), holders)

    async def lost(self, engine: str) -> None:
        await asyncio.gather(*(each.asked("lost", engine) for each in self.shards))

    async def gone(self, front: str) -> None:
        self._standings.pop(front, None)
        await asyncio.gather(*(each.asked("gone", front) for each in self.shards))

    def close(self) -> None:
        """End its actors, for all who use them."""
        for each in self.shards:
            ray.kill(each.actor, no_restart=True)

    def _by_shard(self, ids: Collection[str]) -> defaultdict[int, list[str]]:
        found: defaultdict[int, list[str]] = defaultdict(list)
        for each in ids:
            found[zlib.crc32(each.encode()) % len(self.shards)].append(each)
        return found

    def _standing(self, front: str) -> list[_Standing]:
        return self._standings.setdefault(front, [_Standing() for _ in self.shards])

    def _incarnation(self, front: str) -> str:
        standing = self._standing(front)
        known = any(each.incarnation for each in standing)
        return "/".join(f"{each.incarnation}.{each.lapses}" for each in standing) if known else ""


@dataclass
class _Standing:
    """What a shard knows of a front."""

    incarnation: str = ""
    """As it was told last."""
    lapses: int = 0
    """Times that reports were missed."""
    missed: bool = False

    def answered(self, incarnation: str | None) -> None:
        """It has answered, unless that is None."""
        if incarnation is not None:
            self.lapses += self.missed
            self.incarnation, self.missed = incarnation, False


class _Shard:
    """An actor that is asked for as long as it answers.

    Args:
        actor: Its handle.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._rests_until = 0.0

    async def asked(self, method: str, *arguments: Any) -> Any:
        """What it says; None: it did not answer in time, now or a moment ago."""
        if time.monotonic() < self._rests_until:
            return None
        try:
            answer = getattr(self.actor, method).remote(*arguments)
            return await asyncio.wait_for(asyncio.wrap_future(answer.future()), ANSWER_S)
        except (TimeoutError, RayError):
            self._rests_until = time.monotonic() + _REST_S
            return None
