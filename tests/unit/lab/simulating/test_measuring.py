"""Measured costs: of stand-ins whose work takes known time on a clock that they alone advance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support.traced import CONDITIONS

from choreo_agents.engine.elsewhere import CallToPlace, EngineAhead, Routing, route
from choreo_agents.engine.elsewhere.routing import KVToRead
from choreo_agents.engine.elsewhere.sending import SentAnswer
from choreo_agents.engine.recording import recorder
from choreo_agents.lab.experiments.bench_directory.measure import KINDS, key_of
from choreo_agents.lab.experiments.bench_directory.report import DirectoryReport
from choreo_agents.lab.simulating import far, fitting, instant, measuring
from choreo_agents.lab.simulating.costs import ServingCosts
from choreo_agents.lab.simulating.far import measured_transfer
from choreo_agents.lab.simulating.instant import InstantEngine
from choreo_agents.lab.simulating.measuring import Probe, measured_costs, measured_front
from choreo_agents.models import LoadedModel

PROBE = Probe((8, 64), (1, 4), (16, 128), (1, 4), (2, 6), runs=2, repeats=2)
BYTES_PER_TOKEN = 100
MODEL: Any = SimpleNamespace(
    name="stand-in",
    adapter=SimpleNamespace(vocabulary_size=1000, geometry=SimpleNamespace(bytes_per_token=BYTES_PER_TOKEN)),
)


@dataclass
class Clock:
    """Stands where it is until somebody advances it."""

    now_s: float = 0.0

    def perf_counter(self) -> float:
        """In the place of `time.perf_counter`."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (fitting, instant, recorder):
        monkeypatch.setattr(module, "time", made)
    return made


@dataclass(frozen=True, eq=False)
class Document:
    """A message that was encoded."""

    tokens: int


class SteppedEngine:
    """Takes the time that costs say for prefills, and for rows that step together; whatever is of a new shape, longer.

    Args:
        clock: That it advances.
        costs: Of its work.
    """

    def __init__(self, clock: Clock, costs: ServingCosts) -> None:
        self.model, self.record = MODEL, SimpleNamespace(conditions=lambda: CONDITIONS)
        self._clock, self._costs = clock, costs
        self.kept: list[Document] = []
        self._shapes: set[object] = set()
        self._rows: list[Sequence[Document]] = []

    def prefill(self, tokens: Sequence[int]) -> Document:
        """Encode a message."""
        self._prepare(len(tokens), len(tokens))
        self._clock.now_s += 0.25 + len(tokens) / self._costs.encode_tokens_per_s
        self.kept.append(Document(len(tokens)))
        return self.kept[-1]

    def release(self, document: Document) -> None:
        """Forget one."""
        self.kept.remove(document)

    async def astream(
        self, tokens: Sequence[int], view: Sequence[Document], *, sampling: Any
    ) -> AsyncGenerator[None, None]:
        """A decode: the first of those that are there at once has all of them step."""
        is_first = not self._rows
        self._rows.append(view)
        await asyncio.sleep(0)
        if is_first:
            rows, self._rows = self._rows, []
            shape = [(len(row), sum(each.tokens for each in row)) for row in rows]
            self._prepare((str(shape), sampling.max_tokens), sampling.max_tokens)
            attended = sum(each.tokens for each in {each for row in rows for each in row})
            step_s = self._costs.step_of(len(rows), len(rows), attended, sum(map(len, rows)))
            self._clock.now_s += 0.5 + sampling.max_tokens * step_s
        yield None

    def _prepare(self, shape: object, seconds: float) -> None:
        self._clock.now_s += 0.0 if shape in self._shapes else seconds
        self._shapes.add(shape)


def test_steps_and_prefills_cost_what_they_take(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what each of them begins with, nor what is only done the first time."""
    fronts = {"front_s": 3.0, "answer_s": 4.0, "token_s": 5.0}
    monkeypatch.setattr(measuring, "measured_front", lambda model, probe, on_probe: fronts)
    costs = ServingCosts(encode_tokens_per_s=800.0, step_s=0.02, row_s=0.003, attended_s=4e-5, segment_s=7e-4)
    engine: Any = SteppedEngine(clock, costs)
    found = measured_costs(engine, PROBE)
    names = ("encode_tokens_per_s", "step_s", "row_s", "attended_s", "segment_s")
    expected = {name: getattr(costs, name) for name in names} | fronts | {"bytes_per_token": BYTES_PER_TOKEN}
    assert found.costs == pytest.approx(expected)
    assert not engine.kept, "nothing of it stays"


BEFORE_S, TOKEN_S, AFTER_S = 0.003, 0.0002, 0.001
"""That a front takes for a call before it is sent, for each token, and for its answer."""


def test_a_front_costs_what_it_takes_before_and_after_a_call(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, embedded: LoadedModel
) -> None:
    class TimedFront(InstantEngine):
        """Has the clock go on as if the front that asks it took its time."""

        async def run(self, sent: Any) -> AsyncGenerator[Any]:
            clock.now_s += BEFORE_S
            async for each in super().run(sent):
                clock.now_s += AFTER_S if isinstance(each, SentAnswer) else TOKEN_S * len(each)
                yield each

    monkeypatch.setattr(measuring, "InstantEngine", TimedFront)
    found = measured_front(embedded, PROBE)
    assert found["token_s"] == pytest.approx(TOKEN_S)
    assert found["front_s"] + found["answer_s"] == pytest.approx(BEFORE_S + AFTER_S)
    # What is heard behind the sending is an answer and its one token.
    assert found["front_s"] / found["answer_s"] == pytest.approx(BEFORE_S / (AFTER_S + TOKEN_S))


class FarEngines:
    """A front over engines that encode anything in the same time: what differs is to send calls and copies."""

    def __init__(self, clock: Clock, costs: ServingCosts, engines: int, routing: Routing) -> None:
        self._clock, self._costs, self._routing = clock, costs, routing
        self._names = [f"engine {number}" for number in range(engines)]
        self._where: dict[Document, set[str]] = {}

    def prefill(self, tokens: Sequence[int], view: Sequence[Document] = ()) -> Document:
        """Encode a message where the route says, with what it reads copied there."""
        reads = [KVToRead(str(id(each)), BYTES_PER_TOKEN * each.tokens, self._where[each]) for each in view]
        ahead = [EngineAhead(name) for name in self._names]
        found = self._routing(CallToPlace(reads, len(tokens), 0.0), ahead, self._costs.routing)
        self._clock.now_s += 0.25 + self._costs.call_s + len(set(found.copies.values())) * self._costs.copy_s
        self._clock.now_s += found.bytes_copied / self._costs.copy_bytes_per_s
        for each in view:
            self._where[each].add(found.engine)
        self._where[made := Document(len(tokens))] = {found.engine}
        return made


def test_calls_and_copies_cost_what_they_take(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = ServingCosts(call_s=0.006, copy_s=0.02, copy_bytes_per_s=5e5)

    @contextmanager
    def make_front(model: Any, engines: int, *, routing: Routing = route, costs: Any = costs) -> Iterator[Any]:
        yield FarEngines(clock, costs, engines, routing)

    @contextmanager
    def alone(model: Any) -> Iterator[Any]:
        yield FarEngines(clock, ServingCosts(call_s=0.0), 1, route)

    monkeypatch.setattr(far, "Engine", SimpleNamespace(load=alone))
    found = measured_transfer(MODEL, make_front, PROBE)
    assert found == pytest.approx({name: getattr(costs, name) for name in found}) and len(found) == 3


def test_an_id_costs_the_directory_what_the_slower_of_its_two_tasks_takes() -> None:
    """At its best with each: 4,000 ids in a second that are asked for, 2,000 that are told."""
    rates = {"lookups": {1: 1000.0, 4: 4000.0}, "reports": {1: 2000.0, 4: 500.0}}
    records = {key_of(kind, clients, 0): {"ids_per_s": rates[kind][clients]} for kind in KINDS for clients in (1, 4)}
    found = DirectoryReport({"clients": (1, 4)}, records, 1).costs()
    assert found.costs == {"lookup_s": pytest.approx(1 / 2000)}
