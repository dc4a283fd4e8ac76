"""Fronts in simulated time: what is done for a call, as `engine.elsewhere.errand` does it, placed by the same fleet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

from simpy import Environment, Event

from choreo_agents.engine.calls import Decode
from choreo_agents.engine.elsewhere.fleet import Fleet, Outpost, Wish
from choreo_agents.engine.elsewhere.routing import Route
from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.lab.simulating.costs import ServingCosts
from choreo_agents.lab.simulating.engines import Processing, ServedCall, SharedCores, SimulatedEngine
from choreo_agents.sampling import Sampling

_SALT = "simulated"
_LEAST_S = 1e-12
"""What is left of less than that is rounding."""


@dataclass(frozen=True)
class AskedDecode:
    """A call that a run makes."""

    author: str
    decoded: Message
    """What it decodes; when it is placed, nothing of that is known but its header."""
    made: Message
    """What it has said in the end: the same, or an answer that was thought out."""
    header: int
    samples: int
    most: int
    """Tokens that it might sample."""


@dataclass
class Copied:
    """What was done so that calls could run where they did."""

    calls: int = 0
    moved: int = 0
    """Calls that ran elsewhere than the one before of their thread."""
    copies: int = 0
    """Messages whose KV was copied."""
    bytes_moved: int = 0
    refused: int = 0
    """Messages that were to be copied and were not there when their turn came: they were encoded again."""
    first_token_s: list[float] = field(default_factory=list)
    """Of each call: from when it was due to its first token."""


class Clerk:
    """A process with one event loop, a front's or the directory's: all that it has to do goes on side by side.

    Args:
        env: Simulated time.
        cores: Where it computes.
    """

    def __init__(self, env: Environment, cores: SharedCores) -> None:
        self._env, self._cores = env, cores
        self._done_s = 0.0
        """Seconds that it has given to each of those that were there all the time."""
        self._jobs: list[tuple[float, int, Event]] = []
        """How far that has to come until each is done, as a heap."""
        self._numbers = count()
        self._came = env.event()
        self._since_s, self._slower = env.now, 1.0
        self.busy_s = 0.0
        env.process(self._run())

    def work(self, seconds: float) -> Processing:
        """Have something done that takes so long if there is nothing else."""
        if not seconds:
            return
        done = self._env.event()
        self._catch_up()
        heappush(self._jobs, (self._done_s + seconds, next(self._numbers), done))
        if not self._came.triggered:
            self._came.succeed()
        yield done

    def _run(self) -> Processing:
        while True:
            self._came = self._env.event()
            if not self._jobs:
                yield self._came
                continue
            self._since_s, self._slower = self._env.now, self._cores.taken(1.0)
            left = max(0.0, self._jobs[0][0] - self._done_s) * len(self._jobs) * self._slower
            yield self._env.timeout(left) | self._came
            self._cores.given()
            self._catch_up()
            while self._jobs and self._jobs[0][0] <= self._done_s + _LEAST_S:
                heappop(self._jobs)[2].succeed()

    def _catch_up(self) -> None:
        """Count what was done since it was last looked at."""
        passed, self._since_s = self._env.now - self._since_s, self._env.now
        if self._jobs:
            self.busy_s += passed
            self._done_s += passed / (len(self._jobs) * self._slower)


class SimulatedDirectory:
    """Knows which engines have what, for several fronts.

    Args:
        env: Simulated time.
        costs: Of each time that it is asked or told, and of each id.
    """

    def __init__(self, env: Environment, costs: ServingCosts) -> None:
        self._env, self._costs = env, costs
        self.clerk = Clerk(env, SharedCores(None))
        self.ids = 0
        """That it was asked for and told."""
        self._holders: defaultdict[str, dict[str, set[int]]] = defaultdict(dict)
        """The engines that have a message, and for which fronts."""

    def holders(self, ids: Collection[str]) -> Processing:
        """Look ids up; the answer is in `known` when it is done."""
        yield from self._work(len(ids))

    def known(self, message_id: str) -> list[str]:
        """The engines that have a message."""
        return list(self._holders.get(message_id, ()))

    def changed(self, front: int, engine: str, ids: Collection[str], *, there: bool) -> None:
        """A front says what an engine has for it now, or has no longer; it does not wait."""
        for each in ids:
            fronts = self._holders[each].setdefault(engine, set())
            if there:
                fronts.add(front)
                continue
            fronts.discard(front)
            if not fronts:
                del self._holders[each][engine]
            if not self._holders[each]:
                del self._holders[each]
        self._env.process(self._work(len(ids)))

    def _work(self, ids: int) -> Processing:
        self.ids += ids
        yield from self.clerk.work(self._costs.directory_s + self._costs.lookup_s * ids)


class SimulatedFront:
    """One front.

    Args:
        env: Simulated time.
        number: Which.
        fleet: The product's own knowledge of engines, by which calls are placed.
        engines: By name.
        costs: Of a call and of copies.
        directory: That it shares with others; None: it is the only one.
        cores: Where it computes.
        moved: Is told of what moves.
    """

    def __init__(
        self,
        env: Environment,
        number: int,
        fleet: Fleet,
        engines: Mapping[str, SimulatedEngine],
        costs: ServingCosts,
        directory: SimulatedDirectory | None,
        cores: SharedCores,
        moved: Copied,
    ) -> None:
        self.clerk = Clerk(env, cores)
        self._env, self._number, self._fleet, self._engines, self._costs = env, number, fleet, engines, costs
        self._directory, self._moved = directory, moved
        if directory is not None:
            fleet.on_change = partial(directory.changed, number)
        self._calls = 0
        self._coming: dict[tuple[str, str], Event] = {}
        """Happens when a message's copy has come to an engine, or will not."""
        self._homes: dict[Scope, str] = {}
        self._samplings: dict[int, Sampling] = {}

    def call(self, asked: AskedDecode, thread: Scope) -> Processing:
        """One call, from when it is due to when its answer is there."""
        due, costs, fleet = self._env.now, self._costs, self._fleet
        yield from self.clerk.work(costs.front_s)
        message = asked.decoded
        yield from self._looked_up([each.handle.id for each in message.parents])
        self._calls += 1
        number = self._calls
        sampling = self._samplings.setdefault(asked.most, Sampling(max_tokens=asked.most))
        decode = Decode(header=[0], sampling=sampling, author=asked.author)
        placed = fleet.place(Wish(number, _asked(message, asked.header), decode, None, thread))
        assert placed is not None, "all engines are there"
        self._count(placed, thread)
        outpost, engine = fleet.outposts[placed.engine], self._engines[placed.engine]
        yield from self._bring(message, placed, outpost)
        fleet.holds(outpost.name, {each.handle.id: _SALT for each in message.parents})
        yield self._env.timeout(costs.call_s / 2)
        row = engine.serve(ServedCall(self._number, message, asked.header, asked.samples, asked.made))
        if asked.samples:
            yield row.first
            fleet.encoded(outpost.name, number)
            self._moved.first_token_s.append(self._env.now + costs.call_s / 2 - due)
        yield row.done
        yield self._env.timeout(costs.call_s / 2)
        fleet.holds(outpost.name, {asked.made.handle.id: _SALT})
        fleet.ended(outpost.name, number, decode, asked.samples)
        yield from self.clerk.work(costs.answer_s + costs.token_s * asked.samples)
        self._moved.calls += 1

    def drop(self, ids: Iterable[str]) -> None:
        """Nobody needs these messages any more."""
        for each in ids:
            for engine, _ in self._fleet.dropped(each):
                self._engines[engine.name].release(self._number, each)
            self._fleet.hear({each: ()})

    def _looked_up(self, ids: Sequence[str]) -> Processing:
        """Ask the directory for what no engine has for this front."""
        if (directory := self._directory) is None:
            return
        unknown = [each for each in ids if not self._fleet.holders(each)]
        if unknown:
            yield self._env.timeout(self._costs.call_s / 2)
            yield from directory.holders(unknown)
            known = {each: directory.known(each) for each in unknown}
            yield self._env.timeout(self._costs.call_s / 2)
            self._fleet.hear(known)

    def _count(self, placed: Route, thread: Scope) -> None:
        self._moved.moved += self._homes.get(thread, placed.engine) != placed.engine
        self._homes[thread] = placed.engine

    def _bring(self, message: Message, placed: Route, outpost: Outpost) -> Processing:
        """Have what is copied for a call where it runs, each message once (see `Copies`)."""
        by_source: defaultdict[str, list[Message]] = defaultdict(list)
        waits: list[Event] = []
        begun: list[tuple[str, str]] = []
        for parent in message.parents:
            key = (outpost.name, parent.handle.id)
            source = placed.copies.get(parent.handle.id)
            if (coming := self._coming.get(key)) is not None:
                waits.append(coming)
            elif source is not None and parent.handle.id not in outpost.held:
                by_source[source].append(parent)
                begun.append(key)
                self._coming[key] = self._env.event()
        for source, messages in by_source.items():
            yield from self._copy(self._engines[source], self._engines[outpost.name], messages)
        for key in begun:
            self._coming.pop(key).succeed()
        for coming in waits:
            yield coming
        self._fleet.arrived(outpost.name, placed.bytes_copied)

    def _copy(self, source: SimulatedEngine, target: SimulatedEngine, messages: Sequence[Message]) -> Processing:
        yield self._env.timeout(self._costs.copy_s)
        given = [each for each in messages if each.handle.id in source.kv]
        nbytes = sum(len(each.tokens) for each in given) * (self._costs.bytes_per_token or 0)
        with source.gives.request() as giving:
            yield giving
            with target.takes.request() as taking:
                yield taking
                yield self._env.timeout(nbytes / self._costs.copy_bytes_per_s)
        target.take(self._number, given)
        self._fleet.holds(target.name, {each.handle.id: _SALT for each in given})
        self._moved.copies += len(given)
        self._moved.refused += len(messages) - len(given)
        self._moved.bytes_moved += nbytes


def _asked(message: Message, header: int) -> Any:
    """The lineage of a call as it is known before: its tokens are the header's."""
    lineage = message.lineage
    return lineage.ended((0,) * max(1, header), ())
