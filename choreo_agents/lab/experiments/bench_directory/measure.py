"""Fills a directory, and asks and tells it from more and more clients at once."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from choreo_agents.lab.simulating.outcome import percentile
from choreo_agents.training.journal import Journal, Record

Asked = Literal["lookups", "reports"]
KINDS: tuple[Asked, ...] = get_args(Asked)
_BATCH = 1000
"""Ids that it is told at once while it is filled."""


class FarDirectory(Protocol):
    """A directory, by what reaches it."""

    async def report(self, front: str, engine: str, added: Collection[str], removed: Collection[str]) -> Any:
        """An engine has messages for a front, and has others no longer."""
        ...

    async def holders(self, front: str, ids: Collection[str]) -> Any:
        """The engines that have messages."""
        ...


class HereDirectory(Protocol):
    """A directory in this process."""

    def report(self, front: str, engine: str, added: Collection[str], removed: Collection[str]) -> Any:
        """See `FarDirectory`."""
        ...

    def holders(self, front: str, ids: Collection[str]) -> Any:
        """See `FarDirectory`."""
        ...


class DirectoryHere:
    """What reaches a directory in this process: what it takes is its own work alone.

    Args:
        directory: Which.
    """

    def __init__(self, directory: HereDirectory) -> None:
        self._directory = directory

    async def report(self, front: str, engine: str, added: Collection[str], removed: Collection[str]) -> Any:
        """See `FarDirectory`."""
        return self._directory.report(front, engine, added, removed)

    async def holders(self, front: str, ids: Collection[str]) -> Any:
        """See `FarDirectory`."""
        return self._directory.holders(front, ids)


_Request = tuple[str, str, list[str], list[str]]
"""Front, engine, and the ids that come and go; of a lookup, those that are asked for."""
MakeDirectory = Callable[[], AbstractAsyncContextManager[FarDirectory]]
"""Makes an empty directory, which ends with the block."""


def key_of(kind: str, clients: int, number: int) -> str:
    """Names what is measured in a journal."""
    return f"{kind} | {clients} | {number}"


@dataclass(frozen=True)
class DirectoryBench:
    """What is asked.

    Args:
        make: Makes the directory.
        ids: That it knows.
        engines: That have them, each a part.
        fronts: That have told it.
        per_request: Ids of each lookup, and of each report as many that come as go.
        requests: Of all clients together, each time.
        clients: How many at once.
        seed: Of what is asked.
    """

    make: MakeDirectory
    ids: int = 1_000_000
    engines: int = 64
    fronts: int = 8
    per_request: int = 8
    requests: int = 20_000
    clients: Sequence[int] = (1, 4, 16, 64)
    seed: int = 0

    @property
    def cells(self) -> int:
        """How much is measured in each round."""
        return len(KINDS) * len(self.clients)

    def measure(self, journal: Journal, repeats: int, on_progress: Callable[[str], None] = lambda what: None) -> None:
        """Do what the journal does not hold yet.

        Args:
            journal: Gets a record of each kind, number of clients and round.
            repeats: Rounds.
            on_progress: Told of each that is over, or was before.
        """
        keys = [key_of(kind, clients, number) for number in range(repeats) for kind, clients in self._parts()]
        if all(key in journal for key in keys):
            for key in keys:
                on_progress(key)
            return
        asyncio.run(self._measure(journal, repeats, on_progress))

    async def _measure(self, journal: Journal, repeats: int, on_progress: Callable[[str], None]) -> None:
        async with self.make() as directory:
            filled_s = await self._fill(directory)
            if "fill" not in journal:
                journal.add("fill", {"ids": self.ids, "ids_per_s": self.ids / filled_s})
            for number in range(repeats):
                for kind, clients in self._parts():
                    key = key_of(kind, clients, number)
                    if key not in journal:
                        journal.add(key, await self.asked(directory, kind, clients, number))
                    on_progress(key)

    async def asked(self, directory: FarDirectory, kind: Asked, clients: int, number: int) -> Record:
        """So many clients at once, each of which asks again when it has its answer."""
        each = max(1, self.requests // clients)
        # Drawn before: what is timed is the directory, and what reaches it.
        requests = [self._drawn(kind, client, number, each) for client in range(clients)]
        began = time.perf_counter()
        waits = await asyncio.gather(*(_timed(directory, kind, drawn) for drawn in requests))
        took = time.perf_counter() - began
        waited_s = [seconds for wait in waits for seconds in wait]
        ids = sum(len(come) + len(gone) for drawn in requests for _, _, come, gone in drawn)
        return {
            "kind": kind,
            "clients": clients,
            "round": number,
            "requests": len(waited_s),
            "ids_per_s": ids / took,
            "p50_s": percentile(waited_s, 50),
            "p95_s": percentile(waited_s, 95),
        }

    def _drawn(self, kind: Asked, client: int, number: int, each: int) -> list[_Request]:
        """What a client asks for, or tells: of each report as much goes as the one before has told."""
        drawn = random.Random(f"{self.seed} {kind} {client} {number}")
        front = f"front {client % self.fronts}"
        if kind == "lookups":
            places = ([drawn.randrange(self.ids) for _ in range(self.per_request)] for _ in range(each))
            return [(front, "", [*map(self._id, asked)], []) for asked in places]
        engine = f"engine {drawn.randrange(self.engines)}"
        told = [
            [self._id(f"{client} {number} {request} {place}") for place in range(self.per_request)]
            for request in range(each + 1)
        ]
        return [(front, engine, come, gone) for come, gone in zip(told[1:], told, strict=False)]

    async def _fill(self, directory: FarDirectory) -> float:
        took = 0.0
        for first in range(0, self.ids, _BATCH):
            batch = [self._id(number) for number in range(first, min(first + _BATCH, self.ids))]
            place = first // _BATCH
            began = time.perf_counter()
            await directory.report(f"front {place % self.fronts}", f"engine {place % self.engines}", batch, ())
            took += time.perf_counter() - began
        return took

    def _parts(self) -> Iterator[tuple[Asked, int]]:
        for kind in KINDS:
            for clients in self.clients:
                yield kind, clients

    def _id(self, number: object) -> str:
        """As ids of messages are."""
        return hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=16).hexdigest()


async def _timed(directory: FarDirectory, kind: Asked, requests: Sequence[_Request]) -> list[float]:
    waited: list[float] = []
    for front, engine, come, gone in requests:
        began = time.perf_counter()
        if kind == "lookups":
            await directory.holders(front, come)
        else:
            await directory.report(front, engine, come, gone)
        waited.append(time.perf_counter() - began)
    return waited


def saturated(rates: Mapping[int, float], gain: float = 1.1) -> int:
    """The fewest clients beyond which twice as many or more do not get a tenth more done.

    Args:
        rates: Ids in a second, by the number of clients.
        gain: What counts as more.
    """
    ordered = sorted(rates)
    for place, clients in enumerate(ordered):
        if all(rates[more] < gain * rates[clients] for more in ordered[place + 1 :]):
            return clients
    return ordered[-1]
