"""A graph on given inputs under several methods, the same words in all: what each encodes, how long it takes, and where
answers differ."""

from __future__ import annotations

import copy
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any, Literal, TypedDict, Unpack, cast

from langchain_core.messages import BaseMessage, HumanMessage, convert_to_messages
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs
from langgraph.types import Command, Send

from choreo_agents.arguments import refuses_unknown
from choreo_agents.engine import Engine, twin_of
from choreo_agents.engine.settings import MethodName
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.compiled_graph import CompiledChoreoGraph, require_compiled
from choreo_agents.graph.copying import GraphCopy
from choreo_agents.graph.langgraph_internals import called_with, place_in_superstep, stops_of, superstep_of
from choreo_agents.graph.nesting import author_of
from choreo_agents.graph.run_context import CallRequest, CallResult, ReplayedNode, RunContext, RunListener
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.graph.view.call_id import RunOptions
from choreo_agents.synthesis.placing import Strategy
from choreo_agents.tracing import table_html

METHODS: tuple[MethodName, ...] = ("choreo", "baseline", "naive")
Figure = Literal["tokens_encoded", "tokens_reused", "first_token_s", "end_to_end_s"]
_Place = tuple[str, int, int, int]
"""Author, superstep, branch and call."""


@dataclass(frozen=True)
class Cost:
    """What one run cost; of several inputs, sums, and the mean of first tokens."""

    tokens_encoded: int
    tokens_reused: int
    first_token_s: float
    """Mean over its calls: from a node's start, encoding of what it reads included."""
    end_to_end_s: float
    """Without the time of functions and tools, whose results are given."""
    steps: int


@dataclass(frozen=True)
class ComparedInput:
    """One input under all methods."""

    costs: Mapping[str, Cost]
    """With the same words."""
    answers: Mapping[str, str]
    """The last message, of runs that decode freely."""
    words: Mapping[str, Mapping[_Place, str]]
    """All that was said in these runs, in order."""

    @property
    def differs(self) -> str | None:
        """Who is the first whose words depend on the method; None: nobody's do."""
        places = dict.fromkeys(place for said in self.words.values() for place in said)
        return next((each[0] for each in places if len({said.get(each) for said in self.words.values()}) > 1), None)


@dataclass(frozen=True)
class Comparison:
    """What `compare` has found."""

    ways: tuple[str, ...]
    """Methods, and strategies of synthesizers: choreo, then the others as they were named."""
    inputs: tuple[ComparedInput, ...]
    repeats: int

    def cost(self, way: str) -> Cost:
        """Return what a method took for all inputs."""
        return _summed([each.costs[way] for each in self.inputs])

    def ratio(self, way: str, figure: Figure) -> float:
        """Return how many times as much as choreo a method took; infinity, if choreo took none."""
        own = getattr(self.cost("choreo"), figure)
        return float(getattr(self.cost(way), figure) / own if own else "inf")

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row for each figure: what each method took, and the others' over choreo's."""
        styles: dict[str, tuple[Figure, float, str]] = {
            "tokens encoded": ("tokens_encoded", 1, ",.0f"),
            "tokens reused": ("tokens_reused", 1, ",.0f"),
            "first token, ms": ("first_token_s", 1e3, ",.1f"),
            "end to end, ms": ("end_to_end_s", 1e3, ",.0f"),
        }
        others = [each for each in self.ways if each != "choreo"]
        return [
            (
                label,
                *(format(getattr(self.cost(method), name) * scale, style) for method in self.ways),
                *("" if name == "tokens_reused" else f"{self.ratio(method, name):.2f}x" for method in others),
            )
            for label, (name, scale, style) in styles.items()
        ]

    @property
    def columns(self) -> tuple[str, ...]:
        """What stands above them."""
        return ("", *self.ways, *(f"{each}/choreo" for each in self.ways if each != "choreo"))

    def _repr_html_(self) -> str:
        told = sum(each.differs is not None for each in self.inputs)
        return table_html(f"{len(self.inputs)} inputs, {told} answered otherwise", self.columns, self.rows())


class CompareOptions(TypedDict, total=False):
    """How a graph is compared."""

    methods: Sequence[MethodName]
    """`choreo`: from the cache; `baseline`: text with a prefix cache; `naive`: text without one."""
    strategies: Sequence[Strategy]
    """By which its synthesizers merge instead, from the cache: a way of its own for each."""
    repeats: int
    """Timed runs of each way, 3 unless it is said; times are medians."""
    seed: int | None
    """Of the runs; None: the engine's."""
    config: RunnableConfig | None
    """What functions, prompts and routes are to find in their config."""
    context: Any
    """And in their runtime."""
    progress: Callable[[int, int], None]
    """Told how many runs of how many are over."""


@refuses_unknown(CompareOptions)
def compare(app: CompiledChoreoGraph, inputs: Sequence[Any], **options: Unpack[CompareOptions]) -> Comparison:
    """Run a graph on inputs under several methods, and say what each encodes, how long it takes, and what it answers.

    The first method runs each input freely: its words are forced on all, which still pay for every step, and take
    turns. Functions and tools run in that first run alone: where another is given the same, it is given the result. All
    but `naive`, whose words are the baseline's, then decode freely, too, which shows where answers differ; a function
    that is given something else there runs again. Every run has fresh engines of the graph's models, whose caches are
    cold: the graph's own engines and threads stay as they are. What functions write to a store they do write; what they
    ask of an engine by themselves, or of a graph with a config of their own, is part of the function.

    Args:
        app: The graph, compiled with an engine.
        inputs: States that the graph begins with, or text: a user's message.
        **options: See `CompareOptions`.

    Raises:
        InvalidRequestError: There is nothing to compare, or no input; a run does not come to its end; the graph has no
            synthesizer, and strategies are named; an engine of the graph computes elsewhere.
    """
    return run_coroutine(acompare(app, inputs, **options))


@refuses_unknown(CompareOptions)
async def acompare(app: CompiledChoreoGraph, inputs: Sequence[Any], **options: Unpack[CompareOptions]) -> Comparison:
    """See `compare`."""
    require_compiled(app)
    methods, strategies = options.get("methods", METHODS), options.get("strategies", ())
    repeats = options.get("repeats", 3)
    if not inputs or isinstance(inputs, str | Mapping):
        raise InvalidRequestError(
            f"give the inputs to compare on as a list, of states or of a user's words: not {inputs!r:.80}"
        )
    each_once = len({*methods, *strategies}) == len(methods) + len(strategies) >= 2
    if "choreo" not in methods or not {*methods} <= {*METHODS} or not each_once or repeats < 1:
        raise InvalidRequestError(
            f"compare takes 'choreo' and others of {', '.join(METHODS)}, or strategies, each once; repeats from 1 on: "
            f"not methods={methods!r}, strategies={strategies!r}, repeats={repeats!r}"
        )
    if cast(Any, app.builder).resolver is not None:
        raise InvalidRequestError("a graph that serves several tenants is not compared: compile it without tenant=...")
    ways: dict[str, tuple[CompiledChoreoGraph, MethodName]] = {method: (app, method) for method in methods}
    ways |= {each: (_swapped(app, each), "choreo") for each in strategies}
    free, found, tell = [name for name in ways if name != "naive"], [], options.get("progress")
    order = [*free, *(repeats * [*ways])]
    for number, given in enumerate(inputs, start=1):
        runs: dict[str, list[_Run]] = defaultdict(list)
        known, forced = defaultdict[str, list[Any]](list), None
        for at, name in enumerate(order, start=1):
            own: Any = {"thread_id": f"compare {number}", "choreo": RunOptions(options.get("seed"), forced)}
            called = merge_configs(options.get("config"), {"configurable": own})
            state, results = _state(given, number), _Results(known, keeps=at == 1)
            runs[name].append(await _run(*ways[name], state, called, options.get("context"), results))
            runs[name][-1].require(number, forced)
            if at == len(free):
                forced = defaultdict[Any, Any](lambda: None, runs[free[0]][0].tokens)
            if tell is not None:
                tell((number - 1) * len(order) + at, len(inputs) * len(order))
        costs = {name: _typical([each.cost for each in runs[name][-repeats:]]) for name in ways}
        answers = {name: runs[name][0].answer for name in free}
        found.append(ComparedInput(costs, answers, {name: runs[name][0].words for name in free}))
    return Comparison(tuple(sorted(ways, key=lambda way: way != "choreo")), tuple(found), repeats)


def _swapped(app: CompiledChoreoGraph, strategy: Strategy) -> CompiledChoreoGraph:
    builder: Any = app.builder
    swapped = builder.origin.with_strategy(strategy).compile(**builder.served, **stops_of(app))
    swapped.config = app.config
    return cast(CompiledChoreoGraph, swapped)


async def _run(
    app: CompiledChoreoGraph,
    method: MethodName,
    given: Any,
    called: RunnableConfig,
    context: Any,
    results: _Results,
) -> _Run:
    """Run a copy of a graph on fresh engines."""
    lock = threading.Lock()
    with ExitStack() as held:
        twins: dict[Engine, Engine] = {}

        def twin(engine: Engine) -> Engine:
            with lock:
                if engine not in twins:
                    twins[engine] = held.enter_context(twin_of(engine, method))
                return twins[engine]

        for each in cast(Any, app.builder).engines:
            twin(each)
        graph = GraphCopy().compiled(app, kept=True)
        run, waits, values = _Run(), list[float](), dict[str, Any]()
        listening = RunListener(said=(run.said,), play=partial(results.play, run))
        config = replace(RunContext.of(called_with(graph, called)), twin=twin, listening=listening).into(called)
        started = time.perf_counter()
        async for path, mode, part in graph.astream(
            given, config, context=context, stream_mode=["custom", "values"], subgraphs=True
        ):
            if mode == "custom" and isinstance(part, Mapping) and "ttft_s" in part:
                waits.append(part["ttft_s"])
            elif mode == "values" and not path:
                values = part
        elapsed = time.perf_counter() - started
        if left := (await graph.aget_state(called)).next:
            raise InvalidRequestError(f"a run stops at {', '.join(left)}: graphs are compared that come to their end")
        stats = [each.stats() for each in twins.values()]
    messages = values.get("messages") or [""]
    run.answer = str(getattr(messages[-1], "text", messages[-1]))
    costs = [Cost(s.tokens_encoded + s.tokens_recomputed, s.tokens_reused, 0, 0, s.steps) for s in stats]
    whole = _summed([Cost(0, 0, 0, 0, 0), *costs])
    run.cost = replace(whole, first_token_s=mean(waits or [0.0]), end_to_end_s=elapsed)
    return run


class _Run:
    """What a run has cost, and what its calls have said."""

    cost: Cost
    answer: str

    def __init__(self) -> None:
        self.tokens: dict[_Place, tuple[int, ...]] = {}
        self.words: dict[_Place, str] = {}

        self.shared: set[str] = set()
        """Authors of calls that share a place."""

    def said(self, asked: CallRequest, said: CallResult) -> None:
        if asked.place in self.tokens:
            self.shared.add(asked.author)
        self.tokens[asked.place], self.words[asked.place] = said.tokens, said.words

    def require(self, number: int, forced: Mapping[_Place, Any] | None) -> None:
        """Raise `InvalidRequestError` if they cannot be forced, or others were said than those that were."""
        if not self.tokens:
            raise InvalidRequestError(f"no agent speaks for input {number}: there is nothing to compare")
        if self.shared:
            raise InvalidRequestError(
                f"{', '.join(sorted(self.shared))} speaks several times in one place, in branches of a subgraph or "
                "in a graph that a function calls again: such calls cannot be told apart, and are not compared"
            )
        if forced is not None and not self.tokens.keys() <= {
            place for place, said in forced.items() if said is not None
        }:
            raise InvalidRequestError(f"input {number} has other agents speak when it is run again: it is not compared")


class _Results:
    """What functions and tools have returned for one input, by where they stand and what they were given: a run keeps
    that, or is given it."""

    def __init__(self, known: Mapping[str, list[Any]], *, keeps: bool) -> None:
        self._known, self._keeps = known, keeps
        self._left: dict[str, Iterator[Any]] = {}

    def play(self, run: _Run, given: Any, config: RunnableConfig) -> ReplayedNode:
        """A function or tool as a run has it, whose agents say these words."""
        author = author_of(config)
        key = repr((author, superstep_of(config), place_in_superstep(config), _plain(given)))
        if not self._keeps:
            # The result of the first run for the same, as often as it had one.
            left = self._left.setdefault(key, iter([*self._known.get(key, ())]))
            return next((ReplayedNode(copy.deepcopy(value), is_known=True) for value in left), ReplayedNode())

        def keep(result: Any) -> None:
            # What asks agents is to do so under every method; and handles are those of one engine.
            asks = any(f"{place[0]}|".startswith(f"{author}|") for place in [*run.words])
            if not asks and not _holds_handles(result):
                self._known[key].append(copy.deepcopy(result))

        return ReplayedNode(keep=keep)


def _plain(value: Any) -> Any:
    """What a function is given, without what depends on the method: handles, and what messages tell of their making."""
    if isinstance(value, BaseMessage):
        called = getattr(value, "tool_call_id", None)
        return value.type, value.name, value.content, getattr(value, "tool_calls", None), called
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items() if name != "handles"}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _holds_handles(value: Any) -> bool:
    if isinstance(value, Mapping):
        return {"handle", "message_id"} <= value.keys() or any(map(_holds_handles, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_handles, value))
    if isinstance(value, BaseMessage):
        return _holds_handles([value.additional_kwargs, value.response_metadata])
    return isinstance(value, Command | Send) and _holds_handles(
        value.update if isinstance(value, Command) else value.arg
    )


def _state(given: Any, number: int) -> Any:
    """A copy of an input whose messages have names, the same in every run."""
    state = {"messages": [HumanMessage(given)]} if isinstance(given, str) else copy.deepcopy(given)
    if not isinstance(state, Mapping):
        raise InvalidRequestError(f"input {number} is no state and no text: {given!r}")
    if "messages" not in state:
        return state
    messages = convert_to_messages([state["messages"]] if isinstance(state["messages"], str) else state["messages"])
    named = [each.model_copy(update={"id": each.id or f"input {number} {at}"}) for at, each in enumerate(messages)]
    return {**state, "messages": named}


def _summed(costs: Sequence[Cost]) -> Cost:
    encoded, reused, first_s, whole_s, steps = zip(*map(astuple, costs), strict=True)
    return Cost(sum(encoded), sum(reused), mean(first_s), sum(whole_s), sum(steps))


def _typical(costs: Sequence[Cost]) -> Cost:
    return replace(
        costs[0],
        first_token_s=median(each.first_token_s for each in costs),
        end_to_end_s=median(each.end_to_end_s for each in costs),
    )
