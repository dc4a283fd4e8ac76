"""A front and the directory: what it says of its messages there, and what it learns of others'."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from choreo_agents.engine.elsewhere.directory import Directory
from choreo_agents.engine.elsewhere.fleet import Fleet
from choreo_agents.runtime.lock import EngineLock


class Registering:
    """Reports go out one after the other; what comes up meanwhile is the next. Used on the front's event loop.

    Args:
        directory: Which; it answers soon, or not at all.
        fleet: The engines, and what they have.
        lock: Guards the fleet.
        front: Names the front.
    """

    def __init__(self, directory: Directory, fleet: Fleet, lock: EngineLock, front: str) -> None:
        self._directory, self._fleet, self._lock, self._front = directory, fleet, lock, front
        self._changes: defaultdict[str, dict[str, bool]] = defaultdict(dict)
        """Whether an engine has a message now, by engine and id: what is still to be said."""
        self._incarnation = ""
        """The directory's, as far as it is known: another one has forgotten what was said."""
        self._missed = False
        """Whether it has once not answered since."""
        self._anew = False
        """Whether it is to forget what it was told of this front, since that may be wrong, before it is told again."""
        self._telling = False
        self.soon: Callable[[Callable[[], object]], None]
        """Has something done on the front's event loop, from any thread."""
        self.spawn: Callable[[Coroutine[Any, Any, Any]], None]
        """Begins something there that nobody waits for."""

    def changed(self, engine: str, ids: Collection[str], *, there: bool) -> None:
        """An engine has messages, or has them no longer. Under the lock."""
        self._changes[engine].update(dict.fromkeys(ids, there))
        if not self._telling:
            self._telling = True
            self.soon(lambda: self.spawn(self._tell()))

    def forget(self, engine: str) -> None:
        """An engine is gone, and what was still to be said of it is over. Under the lock."""
        self._changes.pop(engine, None)

    async def look_up(self, ids: Collection[str]) -> None:
        """Let the fleet know who has messages that it knows of nowhere."""
        known = await self._directory.holders(self._front, ids)
        with self._lock:
            self._fleet.hear(known.holders)
            self._notice(known.incarnation)

    async def lost(self, engine: str) -> None:
        """An engine is gone."""
        await self._directory.lost(engine)

    async def leave(self) -> None:
        """The front is gone."""
        await self._directory.gone(self._front)

    async def _tell(self) -> None:
        while True:
            with self._lock:
                changes, self._changes = self._changes, defaultdict(dict)
                if not changes:
                    self._telling = False
                    return
                if anew := self._anew:
                    self._anew, self._incarnation = False, ""
            if anew:
                await self._directory.gone(self._front)
            for engine, ids in changes.items():
                added = [each for each, there in ids.items() if there]
                removed = [each for each, there in ids.items() if not there]
                incarnation = await self._directory.report(self._front, engine, added, removed)
                with self._lock:
                    self._notice(incarnation)

    def _notice(self, incarnation: str) -> None:
        """Say all again to a directory that has forgotten it."""
        if not incarnation:
            self._missed = True  # what was said it may not have heard
            return
        if incarnation == self._incarnation and not self._missed:
            return
        began, self._incarnation = not self._incarnation, incarnation
        missed, self._missed = self._missed, False
        if missed or not began:
            self._anew = True
            for outpost in self._fleet.alive():
                self.changed(outpost.name, self._fleet.shown(outpost.held), there=True)
