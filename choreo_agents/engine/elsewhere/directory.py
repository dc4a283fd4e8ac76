"""Which engines have which messages, whoever had them made there: what fronts of the same engines tell each other.

What it says may be out of date, and may be lost as a whole: then a front copies less, and has more encoded again.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

UNHEARD_S = 600.0
"""Seconds after which a front that says and asks nothing is gone."""


@dataclass(frozen=True)
class KnownHolders:
    """Who has what."""

    incarnation: str
    """Since when the directory knows the front: another one than before, and it has forgotten all of the front's."""
    holders: Mapping[str, Sequence[str]]
    """The engines that have a message, by id; of those that some have."""


class Directory(Protocol):
    """A directory, by what reaches it.

    It answers soon, or what it is asked for is not known: no method raises an error or waits for longer than 0.2 s.
    """

    async def report(self, front: str, engine: str, added: Collection[str], removed: Collection[str]) -> str:
        """An engine has messages for a front, and has others no longer; the incarnation, as of `KnownHolders`."""
        ...

    async def holders(self, front: str, ids: Collection[str]) -> KnownHolders:
        """The engines that have messages, for whichever fronts."""
        ...

    async def lost(self, engine: str) -> None:
        """An engine is gone, with all that it had."""
        ...

    async def gone(self, front: str) -> None:
        """A front is gone, and engines keep nothing for it."""
        ...


class HandleDirectory:
    """Used from one thread. A front that is not heard of for long is gone.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fronts: dict[str, _KnownFront] = {}
        """The longest unheard of first."""
        self._holders: dict[str, dict[str, int]] = {}
        """How many fronts each engine has a message for, by id and engine."""

    def report(self, front: str, engine: str, added: Collection[str] = (), removed: Collection[str] = ()) -> str:
        """See `Directory`. What is in both is there."""
        known = self._heard(front)
        held = known.held[engine]
        for message_id in removed:
            if message_id in held:
                held.discard(message_id)
                self._leave(engine, message_id)
        for message_id in added:
            if message_id not in held:
                held.add(message_id)
                engines = self._holders.setdefault(message_id, {})
                engines[engine] = engines.get(engine, 0) + 1
        return known.incarnation

    def holders(self, front: str, ids: Collection[str]) -> KnownHolders:
        """See `Directory`; engines in the order in which they came to have it."""
        incarnation = self._heard(front).incarnation
        return KnownHolders(incarnation, {each: tuple(self._holders[each]) for each in ids if each in self._holders})

    def lost(self, engine: str) -> None:
        """See `Directory`."""
        for known in self._fronts.values():
            for message_id in known.held.pop(engine, ()):
                self._leave(engine, message_id)

    def gone(self, front: str) -> None:
        """See `Directory`."""
        if (known := self._fronts.pop(front, None)) is not None:
            for engine, held in known.held.items():
                for message_id in held:
                    self._leave(engine, message_id)

    def __len__(self) -> int:
        """Messages that engines have."""
        return len(self._holders)

    def check(self) -> None:
        """Assert that both sides of it say the same."""
        counted: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        for known in self._fronts.values():
            for engine, held in known.held.items():
                for message_id in held:
                    counted[message_id][engine] += 1
        assert counted == self._holders, "a message is somewhere for nobody"

    def _heard(self, front: str) -> _KnownFront:
        now = self._clock()
        known = self._fronts.pop(front, None) or _KnownFront(secrets.token_hex(8))
        known.heard_s = now
        self._fronts[front] = known
        while (first := next(iter(self._fronts))) != front and self._fronts[first].heard_s < now - UNHEARD_S:
            self.gone(first)
        return known

    def _leave(self, engine: str, message_id: str) -> None:
        engines = self._holders[message_id]
        engines[engine] -= 1
        if not engines[engine]:
            del engines[engine]
        if not engines:
            del self._holders[message_id]


class _KnownFront:
    """What engines have for a front."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.held: defaultdict[str, set[str]] = defaultdict(set)
        self.heard_s = 0.0
