"""Engines elsewhere, by whatever reaches them: what makes a front over several, and what its calls and copies cost."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Protocol

from choreo_agents.engine import Engine, Memory, engine_over
from choreo_agents.engine.elsewhere import CallToPlace, Costs, EngineAhead, Route, Routing, route
from choreo_agents.engine.elsewhere.sending import FarEngine
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.lab.simulating.fitting import fitted, timed_s
from choreo_agents.lab.simulating.measuring import USUAL_PROBE, EngineProbe, OnProbe, Probe
from choreo_agents.models import LoadedModel
from choreo_agents.tracing import EventSink, discard


class MakeFront(Protocol):
    """Makes a front over engines, which end with the block."""

    def __call__(
        self,
        model: LoadedModel,
        engines: int,
        *,
        routing: Routing = route,
        costs: Costs | None = None,
        sink: EventSink = discard,
    ) -> AbstractContextManager[Engine]:
        """A front.

        Args:
            model: Of all.
            engines: How many.
            routing: Decides where calls are run, ...
            costs: ... by these; None: by guesses.
            sink: Receives the front's trace events.
        """
        ...


@contextmanager
def in_process(
    model: LoadedModel,
    engines: int,
    *,
    routing: Routing = route,
    costs: Costs | None = None,
    sink: EventSink = discard,
) -> Iterator[Engine]:
    """Over engines in this process (see `MakeFront`): they share its lock, its cores and its memory."""
    with ExitStack() as stack:
        far = [stack.enter_context(Engine.load(model, memory=Memory(kv_budget_bytes=1 << 28))) for _ in range(engines)]
        servers: list[FarEngine] = [each.owner.server(f"engine {n}") for n, each in enumerate(far) if each.owner]
        yield stack.enter_context(engine_over(servers, model, routing=routing, costs=costs or Costs(), sink=sink))


class PlacedOn:
    """Runs all calls on one engine, and copies there whatever another has."""

    def __init__(self, place: int = 0) -> None:
        self.place = place

    def __call__(self, call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
        """See `Routing`."""
        engine = engines[self.place]
        lacking = [read for read in call.reads if read.holders and engine.name not in read.holders]
        copies = {read.id: min(read.holders) for read in lacking}
        return Route(engine.name, copies, (), sum(read.nbytes for read in lacking), 0, 0.0)


class PlacedAtViews(PlacedOn):
    """Runs calls where what they read is, and what reads nothing on one engine."""

    def __call__(self, call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
        """See `Routing`."""
        held = {name for read in call.reads for name in read.holders}
        there = [place for place, engine in enumerate(engines) if engine.name in held]
        return Route(engines[there[0] if there else self.place].name, {}, (), 0, 0, 0.0)


def measured_far_cores(
    model: LoadedModel, make_front: MakeFront, probe: Probe = USUAL_PROBE, on_probe: OnProbe = lambda what: None
) -> float:
    """How many of two engines compute at once, beside the front that hears what they say: at most both.

    Args:
        model: Of all.
        make_front: Makes what is measured.
        probe: How much is.
        on_probe: Told once it is.
    """
    placed, samples = PlacedAtViews(), 4 * probe.samples[1]
    with make_front(model, 2, routing=placed) as front, ExitStack() as stack:
        timed = EngineProbe(front, probe, on_probe)
        views = list[list[MessageHandle]]()
        for placed.place in range(2):
            views += stack.enter_context(timed.views(4, 16, 1))
        one_s, both_s = (timed.median_s(partial(timed.decode, each, samples)) for each in (views[:4], views))
    on_probe("two engines side by side")
    return min(2.0, 2 * one_s / both_s)


def measured_transfer(
    model: LoadedModel, make_front: MakeFront, probe: Probe = USUAL_PROBE, on_probe: OnProbe = lambda what: None
) -> dict[str, float]:
    """What it takes to send a call and have its answer back, and to have KV copied between two engines.

    Args:
        model: Of all.
        make_front: Makes what is measured.
        probe: How much is.
        on_probe: Told of each part that is.
    """
    tokens, placed = _Tokens(model), PlacedOn()
    with make_front(model, 1) as front, Engine.load(model) as alone:
        far_s, near_s = (_prefills_s(engine, tokens, probe.repeats) for engine in (front, alone))
    on_probe("calls there and back")
    per_token = model.adapter.geometry.bytes_per_token
    nbytes, took_s = list[list[float]](), list[float]()
    with make_front(model, 2, routing=placed) as front:
        for length in (1, *probe.lengths):
            rounds: list[float] = []
            for _ in range(1 + probe.repeats):
                placed.place = 0
                document = front.prefill(tokens.drawn(length))
                placed.place = 1
                first_s, again_s = (timed_s(partial(front.prefill, tokens.drawn(1), [document])) for _ in range(2))
                rounds.append(max(0.0, first_s - again_s))
            nbytes.append([1.0, float(length * per_token)])
            took_s.append(median(rounds[1:]))
            on_probe(f"copies of {length} tokens")
    copy_s, byte_s = fitted(nbytes, took_s)
    return {"call_s": max(0.0, far_s - near_s), "copy_s": copy_s, "copy_bytes_per_s": 1 / max(byte_s, 1e-12)}


def _prefills_s(engine: Engine, tokens: _Tokens, repeats: int) -> float:
    engine.prefill(tokens.drawn(1))
    return median(timed_s(lambda: engine.prefill(tokens.drawn(2))) for _ in range(4 * repeats))


class _Tokens:
    """Any that were not encoded before."""

    def __init__(self, model: LoadedModel) -> None:
        self._most, self._random = model.adapter.vocabulary_size, random.Random(1)

    def drawn(self, count: int) -> list[int]:
        """So many."""
        return [self._random.randrange(self._most) for _ in range(count)]
