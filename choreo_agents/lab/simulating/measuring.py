"""Micro-benchmarks that say what work costs: of single calls on an engine, never of the runs that are foretold."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from choreo_agents.engine import Engine, engine_over
from choreo_agents.engine.elsewhere.sending import FarEngine
from choreo_agents.graph import END, START, Agent, ChoreoGraph, RunOptions
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.lab.simulating.costs import CostsFile, MeasuredOn
from choreo_agents.lab.simulating.fitting import fitted, timed_s
from choreo_agents.lab.simulating.instant import InstantEngine
from choreo_agents.lab.simulating.trace import read_trace
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling

OnProbe = Callable[[str], None]
"""Told what was measured."""


@dataclass(frozen=True)
class Probe:
    """How much is measured.

    Args:
        lengths: Tokens of prefills.
        rows: Decodes at once.
        contexts: Tokens that each decode reads, ...
        segments: ... in so many messages.
        samples: Tokens of a short decode and of a long one: the difference is steps alone.
        runs: Of a graph at once, to load a front.
        repeats: Of each, of which the median counts.
    """

    lengths: Sequence[int] = (16, 64, 192, 384)
    rows: Sequence[int] = (1, 4, 16)
    contexts: Sequence[int] = (16, 512)
    segments: Sequence[int] = (1, 8)
    samples: tuple[int, int] = (4, 20)
    runs: int = 8
    repeats: int = 5

    @property
    def parts(self) -> int:
        """How often `OnProbe` is told of something."""
        return len(self.lengths) + len(self.rows) * len(self.contexts) * len(self.segments) + 2


USUAL_PROBE = Probe()
QUICK_PROBE = Probe((8, 64), (1, 4), (16, 128), (1, 4), (2, 6), runs=2, repeats=1)
"""To see it work."""


def measured_costs(engine: Engine, probe: Probe = USUAL_PROBE, on_probe: OnProbe = lambda what: None) -> CostsFile:
    """What steps of an engine cost, what its KV takes, and what a front over such engines computes for a call.

    Args:
        engine: Serves nobody else meanwhile.
        probe: How much is measured.
        on_probe: Told of each part that is.
    """
    steps = EngineProbe(engine, probe, on_probe)
    costs = steps.encoding() | steps.decoding() | measured_front(engine.model, probe, on_probe)
    costs["bytes_per_token"] = engine.model.adapter.geometry.bytes_per_token
    return CostsFile(costs=costs, measured_on=MeasuredOn.here(engine.record.conditions(), engine.model.name))


def measured_cores(engine: Engine, probe: Probe = USUAL_PROBE, on_probe: OnProbe = lambda what: None) -> float:
    """How many of two engines in one process compute at once: less than two by what they share, perhaps than one."""
    few, many = probe.samples
    beside = Engine.load(engine.model)
    try:
        one, other = EngineProbe(engine, probe, on_probe), EngineProbe(beside, probe, on_probe)
        with one.views(4, 16, 1) as views, other.views(4, 16, 1) as theirs:
            single_s = one.median_s(lambda: one.decode(views, 4 * many))
            is_over, is_busy = threading.Event(), threading.Event()

            def compute() -> None:
                while not is_over.is_set():
                    other.decode(theirs, few)
                    is_busy.set()

            thread = threading.Thread(target=compute)
            thread.start()
            is_busy.wait()
            try:
                both_s = one.median_s(lambda: one.decode(views, 4 * many))
            finally:
                is_over.set()
                thread.join()
    finally:
        beside.close()
    on_probe("two engines side by side")
    return min(2.0, 2 * single_s / both_s)


@dataclass
class EngineProbe:
    """Times calls on an engine, or on a front.

    Args:
        engine: Serves nobody else meanwhile, or what it is to be slowed down by.
        probe: How much is measured.
        on_probe: Told of each part that is.
    """

    engine: Engine
    probe: Probe
    on_probe: OnProbe

    def __post_init__(self) -> None:
        self._drawn = random.Random(0)

    def encoding(self) -> dict[str, float]:
        """Tokens in a second, from how prefills of several lengths differ."""
        took: list[float] = []
        for length in self.probe.lengths:
            took.append(self.median_s(partial(self._prefill, length)))
            self.on_probe(f"prefill of {length}")
        [_, each] = fitted([[1.0, float(length)] for length in self.probe.lengths], took)
        return {"encode_tokens_per_s": 1 / max(each, 1e-9)}

    def decoding(self) -> dict[str, float]:
        """What a step takes by rows, by the tokens that they attend to, and by the messages that these are in."""
        cells, took = list[list[float]](), list[float]()
        few, many = self.probe.samples
        for rows in self.probe.rows:
            for context in self.probe.contexts:
                for segments in self.probe.segments:
                    with self.views(rows, context, segments) as views:
                        less = self.median_s(partial(self.decode, views, few))
                        more = self.median_s(partial(self.decode, views, many))
                    took.append((more - less) / (many - few))
                    cells.append([1.0, rows - 1, rows * context, rows * segments])
                    self.on_probe(f"{rows} rows of {context} tokens in {segments} messages")
        names = ("step_s", "row_s", "attended_s", "segment_s")
        found = dict(zip(names, fitted(cells, took), strict=True))
        return found | {"step_s": max(found["step_s"], 1e-6)}

    @contextmanager
    def views(self, rows: int, context: int, segments: int) -> Iterator[list[list[MessageHandle]]]:
        """What so many decodes read: each so many tokens, in so many messages."""
        each = max(1, context // segments)
        views = [[self.engine.prefill(self._tokens(each)) for _ in range(segments)] for _ in range(rows)]
        try:
            yield views
        finally:
            for view in views:
                for handle in view:
                    self.engine.release(handle)

    def _prefill(self, length: int) -> None:
        self.engine.release(self.engine.prefill(self._tokens(length)))

    def decode(self, views: Sequence[Sequence[MessageHandle]], samples: int) -> None:
        """One decode of each view, all at once, whose tokens somebody hears as they come."""
        asyncio.run(self._heard(views, samples))

    async def _heard(self, views: Sequence[Sequence[MessageHandle]], samples: int) -> None:
        sampling = Sampling(max_tokens=samples, temperature=0.0, stop_tokens=())

        async def hear(view: Sequence[MessageHandle]) -> None:
            async for item in self.engine.astream(self._tokens(3), view, sampling=sampling):
                if isinstance(item, MessageHandle):
                    self.engine.release(item)

        await asyncio.gather(*map(hear, views))

    def _tokens(self, count: int) -> list[int]:
        """Any that were not encoded before."""
        return [self._drawn.randrange(self.engine.model.adapter.vocabulary_size) for _ in range(count)]

    def median_s(self, work: Callable[[], None]) -> float:
        """Of several times."""
        work()  # the first of its shape prepares what the others use
        return median(timed_s(work) for _ in range(self.probe.repeats))


def measured_front(
    model: LoadedModel, probe: Probe = USUAL_PROBE, on_probe: OnProbe = lambda what: None
) -> dict[str, float]:
    """CPU of a front for a call: of graphs whose agents are answered at once."""
    far = [InstantEngine(f"instant {number}", model) for number in range(2)]
    engines: list[FarEngine] = [*far]
    front: Engine = engine_over(engines, model)
    few, many = 1, 33
    took_s = {}
    with front:
        asyncio.run(_load(front, 2, few))
        for samples in (few, many):
            rounds = [timed_s(partial(asyncio.run, _load(front, probe.runs, samples))) for _ in range(probe.repeats)]
            took_s[samples] = median(rounds) / (probe.runs * len(_SIDE_BY_SIDE))
            on_probe(f"a front, {samples} tokens a call")
        before = median(_share_before(front, far) for _ in range(probe.repeats))
    token_s = max(0.0, (took_s[many] - took_s[few]) / (many - few))
    call_s = max(0.0, took_s[few] - few * token_s)
    return {"front_s": before * call_s, "answer_s": (1 - before) * call_s, "token_s": token_s}


_SIDE_BY_SIDE = ("Ann", "Bob", "Cleo", "Dan")
"""Three who speak at once, and one behind them."""


async def _load(front: Engine, runs: int, samples: int) -> None:
    """Runs of a graph, all at once."""
    *first, last = _SIDE_BY_SIDE
    compiled = []
    for number in range(runs):
        graph = ChoreoGraph(system=f"Team {number}.", visibility="shared")
        for name in _SIDE_BY_SIDE:
            graph.add_node(Agent(name))
        for name in first:
            graph.add_edge(START, name)
        compiled.append(graph.add_edge(first, last).add_edge(last, END).compile(engine=front))
    await asyncio.gather(*(graph.ainvoke(_GIVEN, _saying(samples)) for graph in compiled))


def _share_before(front: Engine, far: Sequence[InstantEngine]) -> float:
    """Of what a front does for a call, the share that is done before that is sent: of calls one after the other."""
    graph = ChoreoGraph(system="A chain.", visibility="shared")
    for name in _SIDE_BY_SIDE:
        graph.add_node(Agent(name))
    for name, following in zip((START, *_SIDE_BY_SIDE), (*_SIDE_BY_SIDE, END), strict=True):
        graph.add_edge(name, following)
    for engine in far:
        engine.asked_s.clear()
    with TemporaryDirectory() as folder:
        with front.record(path := Path(folder) / "chain.jsonl") as recorder:
            graph.compile(engine=front).invoke(_GIVEN, _saying(1))
        calls = read_trace(path).calls
    sent_s = sorted(recorder.at_s(each) for engine in far for each in engine.asked_s)
    ended_s = [call.ended_s for call in calls]
    before = median(sent - ended for sent, ended in zip(sent_s[1:], ended_s, strict=False))
    after = median(ended - sent for sent, ended in zip(sent_s, ended_s, strict=True))
    return before / (before + after)


_GIVEN: Any = {"messages": [("user", "What now?")]}


def _saying(samples: int) -> Any:
    """The config of a run in which every call says so many tokens."""
    return {"configurable": {"choreo": RunOptions(replay=_EveryoneSays(tuple(range(20, 20 + samples))))}}


class _EveryoneSays(Mapping[tuple[str, int, int, int], tuple[int, ...]]):
    """What all calls of a run are to say: the same."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens

    def __getitem__(self, call: tuple[str, int, int, int]) -> tuple[int, ...]:
        return self._tokens

    def __iter__(self) -> Iterator[tuple[str, int, int, int]]:
        return iter(())

    def __len__(self) -> int:
        return 0
