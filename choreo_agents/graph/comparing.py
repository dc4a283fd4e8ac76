"""Compares a graph under several methods on the same inputs and words: tokens encoded, time, and differing answers."""

from __future__ import annotations

import copy
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from choreo_agents.graph.run_context import CallPlace, CallRequest, CallResult, NodeRun, RunContext, RunListener
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.graph.view.call_id import RunOptions
from choreo_agents.synthesis.placing import Strategy
from choreo_agents.tracing import table_html

METHODS: tuple[MethodName, ...] = ("choreo", "baseline", "naive")
Figure = Literal["tokens_encoded", "tokens_reused", "first_token_s", "end_to_end_s"]


@dataclass(frozen=True)
class Cost:
    """Cost of one run; for several inputs the sums, and the mean of first tokens."""

    tokens_encoded: int
    tokens_reused: int
    first_token_s: float
    """Mean over the run's calls, from a node's start, encoding of its view included."""
    end_to_end_s: float
    """Duration without functions and tools, whose results are replayed."""
    steps: int


@dataclass(frozen=True)
class ComparedInput:
    """Results for one input under all methods."""

    costs: Mapping[str, Cost]
    """Cost by method, with the same words."""
    answers: Mapping[str, str]
    """The last message by method, of runs that decode freely."""
    words: Mapping[str, Mapping[CallPlace, str]]
    """All messages of these runs by method, in order."""

    @property
    def differs(self) -> str | None:
        """The first author whose words depend on the method; None: all words are equal."""
        places = dict.fromkeys(place for words in self.words.values() for place in words)
        return next((p[0] for p in places if len({words.get(p) for words in self.words.values()}) > 1), None)


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`."""

    ways: tuple[str, ...]
    """Methods, and strategies of synthesizers: choreo first, then the others in the given order."""
    inputs: tuple[ComparedInput, ...]
    repeats: int

    def cost(self, way: str) -> Cost:
        """Return the cost of a method for all inputs."""
        return _sum([item.costs[way] for item in self.inputs])

    def ratio(self, way: str, figure: Figure) -> float:
        """Return a method's figure over choreo's; infinity if choreo's is 0."""
        own = getattr(self.cost("choreo"), figure)
        return float(getattr(self.cost(way), figure) / own if own else "inf")

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row for each figure: its value for each method, and the ratios to choreo."""
        styles: dict[str, tuple[Figure, float, str]] = {
            "tokens encoded": ("tokens_encoded", 1, ",.0f"),
            "tokens reused": ("tokens_reused", 1, ",.0f"),
            "first token, ms": ("first_token_s", 1e3, ",.1f"),
            "end to end, ms": ("end_to_end_s", 1e3, ",.0f"),
        }
        baselines = [way for way in self.ways if way != "choreo"]
        return [
            (
                label,
                *(format(getattr(self.cost(method), name) * scale, style) for method in self.ways),
                *("" if name == "tokens_reused" else f"{self.ratio(method, name):.2f}x" for method in baselines),
            )
            for label, (name, scale, style) in styles.items()
        ]

    @property
    def columns(self) -> tuple[str, ...]:
        """Headers of the columns of `rows`."""
        return ("", *self.ways, *(f"{way}/choreo" for way in self.ways if way != "choreo"))

    def _repr_html_(self) -> str:
        differing = sum(item.differs is not None for item in self.inputs)
        return table_html(f"{len(self.inputs)} inputs, {differing} with different answers", self.columns, self.rows())


class CompareOptions(TypedDict, total=False):
    """Options of `compare`."""

    methods: Sequence[MethodName]
    """`choreo`: from the cache; `baseline`: text with a prefix cache; `naive`: text without one."""
    strategies: Sequence[Strategy]
    """Strategies by which its synthesizers merge instead, with method `choreo`: each is compared as a method of its
    own."""
    repeats: int
    """Timed runs of each method, by default 3; times are medians."""
    seed: int | None
    """Seed of the runs; None: the engine's."""
    config: RunnableConfig | None
    """Config for functions, prompts and routes."""
    context: Any
    """LangGraph's runtime context for them."""
    progress: Callable[[int, int], None]
    """Called with the number of finished runs, and of all runs."""


@refuses_unknown(CompareOptions)
def compare(app: CompiledChoreoGraph, inputs: Sequence[Any], **options: Unpack[CompareOptions]) -> Comparison:
    """Run a graph on inputs under several methods, and compare tokens encoded, time and answers.

    The first method runs each input freely: its words are forced on all timed runs, which still pay for every step, and
    take turns. Functions and tools run in that first run alone: other runs replay a result for the same input. All
    methods but `naive`, which would decode the baseline's words, also decode freely, which shows where answers differ;
    a function with another input there runs again. Every run has fresh engines of the graph's models with cold caches:
    the graph's own engines and threads stay as they are. Functions do write to their stores; calls that they make to an
    engine of their own, or to a graph with a config of its own, are part of the function.

    Args:
        app: The graph, compiled with an engine.
        inputs: Initial states of the graph, or text: a user's message.
        **options: See `CompareOptions`.

    Raises:
        InvalidRequestError: There is nothing to compare, or no input; a run does not finish; strategies are given for a
            graph without a synthesizer; or an engine of the graph is remote.
    """
    return run_coroutine(acompare(app, inputs, **options))


@refuses_unknown(CompareOptions)
async def acompare(app: CompiledChoreoGraph, inputs: Sequence[Any], **options: Unpack[CompareOptions]) -> Comparison:
    """Compare asynchronously: see `compare`."""
    require_compiled(app)
    methods, strategies = options.get("methods", METHODS), options.get("strategies", ())
    repeats = options.get("repeats", 3)
    if not inputs or isinstance(inputs, str | Mapping):
        raise InvalidRequestError(f"the inputs to compare must be a list of states or user texts: not {inputs!r:.80}")
    each_once = len({*methods, *strategies}) == len(methods) + len(strategies) >= 2
    if "choreo" not in methods or not {*methods} <= {*METHODS} or not each_once or repeats < 1:
        raise InvalidRequestError(
            f"compare takes 'choreo' and others of {', '.join(METHODS)}, or strategies, each once, and repeats of 1 or "
            f"more: not methods={methods!r}, strategies={strategies!r}, repeats={repeats!r}"
        )
    if cast(Any, app.builder).resolver is not None:
        raise InvalidRequestError("cannot compare a graph that serves several tenants: compile it without tenant=...")
    ways: dict[str, tuple[CompiledChoreoGraph, MethodName]] = {method: (app, method) for method in methods}
    ways |= {strategy: (_with_strategy(app, strategy), "choreo") for strategy in strategies}
    free, compared, tell = [name for name in ways if name != "naive"], [], options.get("progress")
    order = [*free, *(repeats * [*ways])]
    for number, value in enumerate(inputs, start=1):
        runs: dict[str, list[_Run]] = defaultdict(list)
        recorded, forced = defaultdict[str, list[Any]](list), None
        for at, name in enumerate(order, start=1):
            own: Any = {"thread_id": f"compare {number}", "choreo": RunOptions(options.get("seed"), forced)}
            called = merge_configs(options.get("config"), {"configurable": own})
            state, results = _initial_state(value, number), _Results(recorded, keeps=at == 1)
            runs[name].append(run := await _run(*ways[name], state, called, options.get("context"), results))
            run.require(number, run if forced is None else runs[free[0]][0])
            if at == len(free):
                forced = defaultdict[Any, Any](lambda: None, runs[free[0]][0].tokens)
            if tell is not None:
                tell((number - 1) * len(order) + at, len(inputs) * len(order))
        costs = {name: _median_cost([run.cost for run in runs[name][-repeats:]]) for name in ways}
        answers = {name: runs[name][0].answer for name in free}
        compared.append(ComparedInput(costs, answers, {name: runs[name][0].words for name in free}))
    return Comparison(tuple(sorted(ways, key=lambda way: way != "choreo")), tuple(compared), repeats)


def _with_strategy(app: CompiledChoreoGraph, strategy: Strategy) -> CompiledChoreoGraph:
    builder: Any = app.builder
    swapped = builder.origin.with_strategy(strategy).compile(**builder.served, **stops_of(app))
    swapped.config = app.config
    return cast(CompiledChoreoGraph, swapped)


async def _run(
    app: CompiledChoreoGraph,
    method: MethodName,
    state: Any,
    called: RunnableConfig,
    context: Any,
    results: _Results,
) -> _Run:
    """Run a copy of a graph on fresh engines, and return its cost and words."""
    lock = threading.Lock()
    with ExitStack() as stack:
        twins: dict[Engine, Engine] = {}

        def twin(engine: Engine) -> Engine:
            with lock:
                if engine not in twins:
                    twins[engine] = stack.enter_context(twin_of(engine, method))
                return twins[engine]

        for engine in cast(Any, app.builder).engines:
            twin(engine)
        graph = GraphCopy().compiled(app, kept=True)
        run, waits, values = _Run(), list[float](), dict[str, Any]()
        listening = RunListener(on_call=(run.record,), around_node=partial(results.play, run))
        config = replace(RunContext.of(called_with(graph, called)), twin=twin, listener=listening).into(called)
        started = time.perf_counter()
        parts = graph.astream(state, config, context=context, stream_mode=["custom", "values"], subgraphs=True)
        async for path, mode, part in parts:
            if mode == "custom" and isinstance(part, Mapping) and "ttft_s" in part:
                waits.append(part["ttft_s"])
            elif mode == "values" and not path:
                values = part
        elapsed = time.perf_counter() - started
        if nodes := (await graph.aget_state(called)).next:
            raise InvalidRequestError(
                f"a run was interrupted at {', '.join(nodes)}: only complete runs can be compared"
            )
        stats = [engine.stats() for engine in twins.values()]
    messages = values.get("messages") or [""]
    run.answer = str(getattr(messages[-1], "text", messages[-1]))
    costs = [Cost(s.tokens_encoded + s.tokens_recomputed, s.tokens_reused, 0, 0, s.steps) for s in stats]
    whole = _sum([Cost(0, 0, 0, 0, 0), *costs])
    run.cost = replace(whole, first_token_s=mean(waits or [0.0]), end_to_end_s=elapsed)
    return run


class _Run:
    """Cost of a run, and the tokens and words of its calls."""

    cost: Cost
    answer: str

    def __init__(self) -> None:
        self.tokens: dict[CallPlace, tuple[int, ...]] = {}
        self.words: dict[CallPlace, str] = {}

        self.ambiguous: set[str] = set()
        """Authors of several calls in one place."""

    def record(self, request: CallRequest, result: CallResult) -> None:
        if request.place in self.tokens:
            self.ambiguous.add(request.place.author)
        self.tokens[request.place], self.words[request.place] = result.tokens, result.words

    def require(self, number: int, first: _Run) -> None:
        """Raise `InvalidRequestError` if its words cannot be forced, or other agents spoke than in the first run."""
        if not self.tokens:
            raise InvalidRequestError(f"no agent answers input {number}: there is nothing to compare")
        if self.ambiguous:
            raise InvalidRequestError(
                f"{', '.join(sorted(self.ambiguous))} ran several times in one place, in branches of a subgraph or in "
                "a graph that a function calls again: such calls cannot be compared"
            )
        if not self.tokens.keys() <= first.tokens.keys():
            raise InvalidRequestError(f"input {number} runs other agents when it is run again: it cannot be compared")


class _Results:
    """Results of functions and tools for one input, by place and arguments: the first run records them, others replay
    them."""

    def __init__(self, recorded: Mapping[str, list[Any]], *, keeps: bool) -> None:
        self._recorded, self._keeps = recorded, keeps
        self._remaining: dict[str, Iterator[Any]] = {}

    @contextmanager
    def play(self, run: _Run, value: Any, config: RunnableConfig) -> Iterator[NodeRun]:
        """Replay a function's or tool's recorded result; if there is none, let it run, and record its result."""
        author = author_of(config)
        key = repr((author, superstep_of(config), place_in_superstep(config), _comparable(value)))
        # Each recorded result is replayed once: the same call may return something else each time.
        known = self._remaining.setdefault(key, iter([*self._recorded.get(key, ())]))
        node_run = next((NodeRun(copy.deepcopy(result), is_known=True) for result in known), NodeRun())
        yield node_run
        # A function that calls agents must do so under every method; and handles belong to one engine.
        asks = any(f"{place[0]}|".startswith(f"{author}|") for place in [*run.words])
        if self._keeps and not asks and not _has_handles(node_run.value):
            self._recorded[key].append(copy.deepcopy(node_run.value))


def _comparable(value: Any) -> Any:
    """Return a function's argument without what depends on the method: handles, and metadata of messages."""
    if isinstance(value, BaseMessage):
        called = getattr(value, "tool_call_id", None)
        return value.type, value.name, value.content, getattr(value, "tool_calls", None), called
    if isinstance(value, Mapping):
        return {name: _comparable(item) for name, item in value.items() if name != "handles"}
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    return value


def _has_handles(value: Any) -> bool:
    if isinstance(value, Mapping):
        return {"handle", "message_id"} <= value.keys() or any(map(_has_handles, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_handles, value))
    if isinstance(value, BaseMessage):
        return _has_handles([value.additional_kwargs, value.response_metadata])
    return isinstance(value, Command | Send) and _has_handles(value.update if isinstance(value, Command) else value.arg)


def _initial_state(value: Any, number: int) -> Any:
    """Return a copy of an input in which all messages have ids, the same in every run."""
    state = {"messages": [HumanMessage(value)]} if isinstance(value, str) else copy.deepcopy(value)
    if not isinstance(state, Mapping):
        raise InvalidRequestError(f"input {number} is neither a state nor a text: {value!r}")
    if "messages" not in state:
        return state
    messages = convert_to_messages([state["messages"]] if isinstance(state["messages"], str) else state["messages"])
    named = [m.model_copy(update={"id": m.id or f"input {number} {at}"}) for at, m in enumerate(messages)]
    return {**state, "messages": named}


def _sum(costs: Sequence[Cost]) -> Cost:
    encoded, reused, first_s, whole_s, steps = zip(*map(astuple, costs), strict=True)
    return Cost(sum(encoded), sum(reused), mean(first_s), sum(whole_s), sum(steps))


def _median_cost(costs: Sequence[Cost]) -> Cost:
    first_s, whole_s = median(cost.first_token_s for cost in costs), median(cost.end_to_end_s for cost in costs)
    return replace(costs[0], first_token_s=first_s, end_to_end_s=whole_s)
