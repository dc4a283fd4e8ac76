"""An engine in simulated time: it serves rows step by step, by the product's own scheduling, and computes nothing."""

from __future__ import annotations

from collections import ChainMap, Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any

from simpy import Environment, Event, Resource

from choreo_agents.engine.elsewhere.sending import lacked
from choreo_agents.engine.messages.message import Message
from choreo_agents.lab.simulating.costs import ServingCosts
from choreo_agents.runtime.scheduler import FirstComeFirstServed, Limits, Running, Waiting

_ROOM = 1 << 60
"""Tokens: memory is no bound here, but counted (see `SimulatedEngine.most_tokens`)."""

Processing = Generator[Event, Any, None]
"""What happens one after the other in simulated time."""


class SharedCores:
    """Processors that engines and fronts share: more of them than there are cores slow each other down.

    Args:
        cores: How many; None: enough for all. Two of one process may get less done than one by itself.
    """

    def __init__(self, cores: float | None) -> None:
        self._cores = cores
        self._busy = 0

    @property
    def are_few(self) -> bool:
        """Whether who computes with them has to look at each step who else does."""
        return self._cores is not None

    def taken(self, seconds: float) -> float:
        """Somebody begins to compute for so long: how long that takes now. `given` ends it."""
        self._busy += 1
        if self._cores is None or self._busy == 1:
            return seconds
        return seconds * max(1.0, self._busy / self._cores)

    def given(self) -> None:
        """Somebody computes no longer."""
        self._busy -= 1


@dataclass
class EncodedTokens:
    """What all engines have encoded."""

    first: int = 0
    """Of messages that calls read, by whoever was first."""
    again: int = 0
    """Of messages that some engine had encoded before."""
    decoded: int = 0
    """Of calls: what was given of their own turns, what was sampled, and what closes it."""
    known: set[str] = field(default_factory=set)
    """Ids of messages that were encoded once."""


@dataclass(frozen=True)
class ServedCall:
    """A call, as an engine is sent it."""

    front: int
    """Sends it."""
    decoded: Message
    """What it decodes; its parents are what it reads."""
    header: int
    """Tokens of its own turn that are given."""
    samples: int
    made: Message
    """What it has said in the end: the same, or an answer that is encoded once it was thought out."""


@dataclass(eq=False)
class SimulatedRow:
    """A request of an engine: a decode, or a message that one reads and the engine lacks."""

    number: int
    message: Message
    pending: int
    """Tokens to encode before the next is sampled; of a prefill, all that are left."""
    samples: int
    """Tokens still to sample."""
    closing: int
    """Tokens to encode once all are sampled."""
    after: set[SimulatedRow]
    """What encodes what it reads."""
    first: Event
    """It has sampled a token."""
    done: Event
    call: ServedCall | None = None
    """None: it is a prefill."""
    needs: Sequence[str] = ()
    """Ids of what is kept for it while it runs."""
    readers: list[SimulatedRow] = field(default_factory=list)
    """Who waits for it."""
    encoded: int = 0

    @property
    def is_steady(self) -> bool:
        """Whether its next steps are alike: each encodes a token and samples one."""
        return self.pending == 1 and self.samples > 0 and self.first.triggered


class RowsView:
    """What the rows of a step attend to."""

    def __init__(self) -> None:
        self._readers: Counter[str] = Counter()
        self.tokens = 0
        """Each counts once, however many rows attend to it."""
        self.segments = 0
        """Each counts for every row."""

    def add(self, row: SimulatedRow) -> None:
        """A row begins."""
        for each in row.message.parents:
            self._readers[each.handle.id] += 1
            self.tokens += len(each.tokens) if self._readers[each.handle.id] == 1 else 0
        self.segments += len(row.message.parents)

    def remove(self, row: SimulatedRow) -> None:
        """It has ended."""
        for each in row.message.parents:
            self._readers[each.handle.id] -= 1
            if not self._readers[each.handle.id]:
                del self._readers[each.handle.id]
                self.tokens -= len(each.tokens)
        self.segments -= len(row.message.parents)
        self.tokens -= row.encoded

    def grow(self, tokens: int) -> None:
        """Rows have encoded tokens, to which their next ones attend."""
        self.tokens += tokens


class SimulatedEngine:
    """One engine.

    Args:
        env: Simulated time.
        name: Its own.
        costs: Of a step.
        limits: Of a step.
        cores: That it shares with others.
        encoded: Is told of what it encodes.
    """

    def __init__(
        self,
        env: Environment,
        name: str,
        costs: ServingCosts,
        limits: Limits,
        cores: SharedCores,
        encoded: EncodedTokens,
    ) -> None:
        self.name = name
        self.gives, self.takes = Resource(env), Resource(env)
        """Its link: one copy leaves it at a time, and one comes."""
        self.kv: dict[str, Message] = {}
        """The messages whose KV it has, by id."""
        self.busy_s = 0.0
        self.steps = self.served = self.tokens = self.most_tokens = 0
        """Steps; calls; tokens of KV now, and at most."""
        self._env, self._costs, self._limits, self._cores, self._encoded = env, costs, limits, cores, encoded
        self._policy = FirstComeFirstServed()
        self._leases: defaultdict[str, set[int]] = defaultdict(set)
        """The fronts that need a message."""
        self._users: Counter[str] = Counter()
        """How many calls under way need one."""
        self._encoding: dict[str, SimulatedRow] = {}
        """What encodes a message now."""
        self._waiting: dict[int, SimulatedRow] = {}
        self._running: dict[int, SimulatedRow] = {}
        self._view = RowsView()
        self._numbers = 0
        self._arrived = env.event()
        env.process(self._run())

    def release(self, front: int, message_id: str) -> None:
        """A front needs a message no longer."""
        self._leases[message_id].discard(front)
        self._tidy(message_id)

    def take(self, front: int, messages: Iterable[Message]) -> None:
        """The KV of messages has come from elsewhere for a front."""
        for message in messages:
            self._leases[message.handle.id].add(front)
            self._have(message)

    def serve(self, call: ServedCall) -> SimulatedRow:
        """A call has come; what it reads, and is not here, is encoded for it before."""
        self.served += 1
        known: Any = ChainMap[str, Any](self._encoding, self.kv)
        needed = {each.handle.id: each for each in lacked(call.decoded.parents, known)}
        reads = [each.handle.id for each in call.decoded.parents]
        for each in reads:
            self._leases[each].add(call.front)
        needs = [*needed, *(each for each in reads if each not in needed), call.made.handle.id]
        self._users.update(needs)
        order = {key: [parent.handle.id for parent in each.parents] for key, each in needed.items()}
        for key in TopologicalSorter(order).static_order():
            if key in needed:
                self._encoding[key] = self._queue(needed[key], len(needed[key].tokens))
        # The last token that is sampled closes the message, with what is behind it.
        closing = max(0, len(call.decoded.tokens) - call.header - max(0, call.samples - 1))
        closing += 0 if call.made is call.decoded else len(call.made.tokens)
        at_first = max(1, call.header) + (0 if call.samples else closing)
        row = self._queue(call.decoded, at_first, call.samples, closing if call.samples else 0)
        row.call, row.needs = call, needs
        if not self._arrived.triggered:
            self._arrived.succeed()
        return row

    def _queue(self, message: Message, pending: int, samples: int = 0, closing: int = 0) -> SimulatedRow:
        self._numbers += 1
        parents = [parent.handle.id for parent in message.parents]
        after = {self._encoding[each] for each in parents if each in self._encoding}
        row = SimulatedRow(
            self._numbers, message, pending, samples, closing, after, self._env.event(), self._env.event()
        )
        for each in after:
            each.readers.append(row)
        self._waiting[row.number] = row
        return row

    def _run(self) -> Processing:
        while True:
            self._arrived = self._env.event()
            if not self._waiting and not self._running:
                yield self._arrived
                continue
            rows = self._planned()
            began, alike = self._env.now, self._alike(rows)
            took = self._steps_s(rows, alike)
            timeout = self._env.timeout(self._cores.taken(took))
            if alike == 1:
                yield timeout
            else:
                yield timeout | self._arrived
                if self._env.now < began + took:
                    # Who has come waits for the end of the step that runs.
                    alike = self._steps_until(rows, alike, self._env.now - began)
                    took = self._steps_s(rows, alike)
                    yield self._env.timeout(max(0.0, began + took - self._env.now))
            self._cores.given()
            self.busy_s += self._env.now - began
            self.steps += alike
            for row, count in rows:
                self._advance(row, count, alike)

    def _planned(self) -> list[tuple[SimulatedRow, int]]:
        """The rows of the next step, and how many tokens each encodes."""
        waiting = [
            Waiting(row.number, 1, not row.after, row.pending, tuple(each.number for each in row.after))
            for row in self._waiting.values()
        ]
        running = [Running(row.number, row.pending) for row in self._running.values()]
        plan = self._policy.plan(waiting, running, _ROOM, self._limits)
        assert not plan.stuck, "there is room for all"
        for number in plan.admitted:
            self._running[number] = self._waiting.pop(number)
            self._view.add(self._running[number])
        return [(self._running[number], count) for number, count in plan.chunks]

    def _alike(self, rows: Sequence[tuple[SimulatedRow, int]]) -> int:
        """How many of the next steps are alike if nobody comes."""
        if self._waiting or self._cores.are_few or not all(row.is_steady for row, _ in rows):
            return 1
        return min(row.samples for row, _ in rows)

    def _steps_s(self, rows: Sequence[tuple[SimulatedRow, int]], alike: int) -> float:
        """Seconds of so many steps of the same rows, each of which attends to a token more from one to the next."""
        tokens = sum(count for _, count in rows)
        one = self._costs.step_of(len(rows), tokens, self._view.tokens, self._view.segments)
        return alike * one + self._costs.attended_s * len(rows) * alike * (alike - 1) / 2

    def _steps_until(self, rows: Sequence[tuple[SimulatedRow, int]], most: int, passed_s: float) -> int:
        """How many of these steps have begun after so many seconds."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self._steps_s(rows, middle) >= passed_s:
                high = middle
            else:
                low = middle + 1
        return low

    def _advance(self, row: SimulatedRow, count: int, steps: int) -> None:
        """A row has encoded so many tokens in each of so many steps, and sampled one in each if it was time."""
        row.encoded += count * steps
        self._view.grow(count * steps)
        if count < row.pending:
            row.pending -= count
            return
        row.pending = 0
        if row.samples:
            row.samples -= steps
            row.pending = 1 if row.samples else row.closing
            if not row.first.triggered:
                row.first.succeed()
        if not row.pending:
            del self._running[row.number]
            self._view.remove(row)
            self._finish(row)

    def _finish(self, row: SimulatedRow) -> None:
        for reader in row.readers:
            reader.after.discard(row)
        key, encoded = row.message.handle.id, self._encoded
        if row.call is None:
            del self._encoding[key]
            self._have(row.message)
            if key in encoded.known:
                encoded.again += row.encoded
            else:
                encoded.first += row.encoded
                encoded.known.add(key)
        else:
            made = row.call.made.handle.id
            encoded.decoded += row.encoded
            encoded.known.add(made)
            self._have(row.call.made)
            self._leases[made].add(row.call.front)
            for each in row.needs:
                self._users[each] -= 1
                self._tidy(each)
        row.done.succeed()

    def _have(self, message: Message) -> None:
        if message.handle.id not in self.kv:
            self.kv[message.handle.id] = message
            self.tokens += len(message.tokens)
            self.most_tokens = max(self.most_tokens, self.tokens)

    def _tidy(self, message_id: str) -> None:
        """Drop what nobody needs."""
        if message_id in self.kv and not self._leases[message_id] and not self._users[message_id]:
            self.tokens -= len(self.kv.pop(message_id).tokens)
            del self._leases[message_id], self._users[message_id]
