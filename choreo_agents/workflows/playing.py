"""Plays workflows: runs the graph of one item or of many on an engine, scores the results, and counts the cost."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from langchain_core.runnables import RunnableConfig

from choreo_agents.engine import Engine, Memory
from choreo_agents.engine.introspection import MemoryMap
from choreo_agents.errors import InvalidRequestError, KVBudgetError
from choreo_agents.graph import ChoreoGraph
from choreo_agents.graph.comparing import Comparison, compare
from choreo_agents.graph.langgraph_internals import branch_of, superstep_of
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.graph.view.call_id import Replay, RunOptions
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.training.journal import Journal, Record
from choreo_agents.workflows.answers import answers_of
from choreo_agents.workflows.cases import CHAT_TOKENS, EMBEDDED_TOKENS, Case, Item, Options, Result, Variant
from choreo_agents.workflows.phrasing import Prompts, load_prompts

T = TypeVar("T")
Place = tuple[int, int]
"""Place of a message in a run: superstep, and number among the parallel branches of its node."""
OnToken = Callable[[str, str, str, Place], None]
"""Called for every chunk of decoded text, with agent, message id, text and the message's place."""
MOST_STEPS = 1000
"""Most supersteps of a run (LangGraph's `recursion_limit`)."""
AT_ONCE = 64
"""Most items that are played concurrently."""
TOKENS_EACH = 2048
"""Tokens of KV memory for each concurrent item: a smaller memory budget lowers their number."""
OnDecode = Callable[[Mapping[str, Any]], None]
"""Called for every finished message with its `stream_mode="custom"` item: agent, tokens encoded and reused, times."""


@dataclass(frozen=True)
class RunCost:
    """Cost of one run. Counts are the engine's, so they are right only for a run that has the engine to itself."""

    ttft_s: tuple[float, ...]
    """Seconds from the node's start to the first token of each decode, including encoding what it reads."""
    end_to_end_s: float
    """Seconds from the graph's start to its end."""
    tokens_encoded: int
    """Tokens encoded for the first time, or again after their KV was evicted."""
    tokens_reused: int
    rows_per_decode_step: float

    @property
    def ttft_mean_s(self) -> float:
        return mean(self.ttft_s)


async def run_graph(
    engine: Engine,
    graph: ChoreoGraph,
    messages: Sequence[Any],
    *,
    replay: Replay | None = None,
    seed: int | None = None,
    on_token: OnToken | None = None,
    on_decode: OnDecode = lambda item: None,
) -> tuple[Mapping[str, Any], RunCost]:
    """Run a graph once and return its end state and its cost.

    Args:
        engine: Serves the graph.
        graph: Compiled here, before the clock starts.
        messages: Input messages.
        replay: Tokens that are forced on every agent, as `sampled` returns them.
        seed: Seed of the run.
        on_token: Called with text as it is decoded.
        on_decode: Called with the cost of each message.
    """
    app = graph.compile(engine=engine)
    config: Any = {"configurable": {"choreo": RunOptions(seed, replay)}, "recursion_limit": MOST_STEPS}
    before = engine.stats()
    state: Mapping[str, Any] = {}
    waits: list[float] = []
    modes: list[Any] = ["custom", "values", *(["messages"] if on_token is not None else [])]
    started = time.perf_counter()
    async for mode, item in app.astream({"messages": list(messages)}, config, stream_mode=modes):
        if mode == "values":
            state = item
        elif mode == "custom":
            waits.append(item["ttft_s"])
            on_decode(item)
        elif on_token is not None:
            message, metadata = item
            where = RunnableConfig(metadata=metadata)
            place = superstep_of(where), branch_of(where)
            on_token(metadata["langgraph_node"], message.id, message.text, place)
    elapsed = time.perf_counter() - started
    after = engine.stats()

    def spent(name: str) -> int:
        return int(getattr(after, name) - getattr(before, name))

    encoded, rows = spent("tokens_encoded") + spent("tokens_recomputed"), spent("decode_rows")
    per_step = rows / max(1, spent("decode_steps"))
    return state, RunCost(tuple(waits), elapsed, encoded, spent("tokens_reused"), per_step)


def sampled(engine: Engine, state: Mapping[str, Any]) -> Replay:
    """Return the tokens that each agent sampled in a finished run, to force them on another run."""
    tokens: dict[tuple[str, int, int, int], tuple[int, ...]] = {}
    for entry in state["handles"]:
        # With thoughts, the sampled message is the one that includes them.
        handle = MessageHandle.model_validate(entry.get("thoughts") or entry["handle"])
        [*_, record] = engine.inspect.records([handle])
        if record.sampled is not None:
            place = (entry["author"], entry["superstep"], entry["branch"], entry["call"])
            tokens[place] = record.tokens[slice(*record.sampled)]
    return tokens


@dataclass(frozen=True)
class Setup:
    """A workflow with its options, prompts and sampling: all that decides a result but the model and the item."""

    case: Case
    options: Options
    prompts: Prompts
    sampling: Sampling

    def changed(self, variant: Variant) -> Setup:
        """Return this setup with a variant's options."""
        options = type(self.options).model_validate(self.options.model_dump() | dict(variant.changes))
        return Setup(self.case, options, self.prompts, self.sampling)

    def as_settings(self, model: LoadedModel) -> dict[str, Any]:
        """Return the setup and the model as plain JSON, for a journal's first line."""
        sampling = self.sampling.with_defaults(model.sampling_defaults)
        return {
            "workflow": self.case.name,
            "options": self.options.model_dump(mode="json"),
            "model": model.name,
            "weights": model.adapter.fingerprint,
            "sampling": sampling.model_dump(mode="json", exclude_defaults=True),
            "prompts": dict(self.prompts.texts),
        }


def make_setup(
    case: Case,
    options: Options,
    loaded: LoadedModel,
    prompts: Path | None,
    temperature: float,
    top_p: float,
    max_tokens: int | None,
) -> Setup:
    """Return a setup with the prompts and the message length that suit the model."""
    embedded = loaded.has_embedded_vocabulary
    most = max_tokens or (EMBEDDED_TOKENS if embedded else CHAT_TOKENS)
    texts = load_prompts(case.name, "embedded" if embedded else "chat", prompts)
    return Setup(case, options, texts, Sampling(temperature=temperature, top_p=top_p, max_tokens=most))


def require_variants(case: Case, names: str) -> list[str]:
    """Split comma-separated names of variants, drop duplicates, and raise `InvalidRequestError` for an unknown one."""
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in case.variants:
            raise InvalidRequestError(f"{case.name} has no method {name!r}: use one of {', '.join(case.variants)}")
    return chosen


@dataclass(frozen=True)
class Setting:
    """An item with its model, setup, seed and memory, to be played on a fresh engine for each method."""

    model: LoadedModel
    setup: Setup
    item: Any
    seed: int = 0
    memory: Memory = field(default_factory=lambda: Memory(kv_budget_bytes=1 << 30))


@dataclass(frozen=True)
class MethodRun:
    """Result and cost of an item under one method."""

    result: Result
    cost: RunCost
    memory: MemoryMap
    """The engine's KV memory at the end of the run."""


def run_method(setting: Setting, variant: str, *, record: Path | None = None, **run: Any) -> MethodRun:
    """Play an item on a fresh engine.

    Args:
        setting: Model, item and setup.
        variant: Name of one of the case's variants.
        record: A new file for the recording of the run.
        run: Further arguments of `run_graph`, such as callbacks.
    """
    served = setting.setup.case.variants[variant]
    setup = setting.setup.changed(served)
    with Engine.load(setting.model, method=served.method, memory=setting.memory) as engine:
        with nullcontext() if record is None else engine.record(record):
            result, _, cost = run_coroutine(_play(engine, setup, setting.item, seed=setting.seed, **run))
        return MethodRun(result, cost, engine.kv.memory_map())


def compared(setting: Setting, repeats: int, progress: Callable[[int, int], None]) -> Comparison:
    """Play an item under three methods with the baseline's answers forced on all, and compare tokens and times.

    Args:
        setting: Model, item and setup.
        repeats: Timed runs of each method.
        progress: Called with the number of finished runs and of all runs.
    """
    setup = setting.setup
    workflow = setup.case.play(setting.item, setup.options, setup.prompts, setup.sampling)
    with Engine.load(setting.model, memory=setting.memory) as engine:
        return compare(
            workflow.graph.compile(engine=engine),
            [{"messages": list(workflow.messages)}],
            methods=("baseline", "choreo", "naive"),
            repeats=repeats,
            seed=setting.seed,
            config={"recursion_limit": MOST_STEPS},
            progress=progress,
        )


async def play(engine: Engine, setup: Setup, item: Item, *, seed: int) -> tuple[Result, list[dict[str, str]], RunCost]:
    """Play one item and return its result, all messages with their nodes, and the cost.

    Args:
        engine: An engine with the variant's method.
        setup: The setup with the variant's options.
        item: The input.
        seed: Seed of the run.
    """
    with engine.scope():
        return await _play(engine, setup, item, seed=seed)


async def _play(engine: Engine, setup: Setup, item: Item, **run: Any) -> tuple[Result, list[dict[str, str]], RunCost]:
    workflow = setup.case.play(item, setup.options, setup.prompts, setup.sampling)
    state, cost = await run_graph(engine, workflow.graph, workflow.messages, **run)
    nodes = dict.fromkeys(entry["author"] for entry in state["handles"] if entry["author"] in workflow.graph.nodes)
    spoken = [{"node": node, "words": words} for node in nodes for words in answers_of(state, node)]
    return setup.case.judge(item, setup.options, setup.prompts, state), spoken, cost


@dataclass(frozen=True)
class PlayProgress:
    """Progress of a variant over its items."""

    variant: str
    finished: int
    """Items with a result, including those that the journal had before."""
    tokens: int = 0
    """Tokens encoded and reused since the start."""
    seconds: float = 0.0


def seeds_of(items: Sequence[Item], seed: int) -> list[int]:
    """Return a seed for each item, which depends on its id and not on its place in the file."""
    return [int.from_bytes(hashlib.sha256(f"{seed} {item.id}".encode()).digest()[:6], "big") for item in items]


def content_of(item: Item) -> str:
    """Return 16 hex digits of an item's content, which differ between items of the same id."""
    return hashlib.sha256(item.model_dump_json(exclude_defaults=True).encode()).hexdigest()[:16]


def require_known(journal: Journal, variant: str, items: Sequence[Item], adapter: str = "") -> None:
    """Raise `InvalidRequestError` if the journal has a result under an item's id that is another item's or adapter's.

    Args:
        journal: The results.
        variant: Key of the results.
        items: The inputs.
        adapter: Digest of the adapter that the variant is played with; empty for the model alone.
    """
    for item in items:
        content = content_of(item) + adapter
        if journal.records.get(f"{variant} | {item.id}", {}).get("content", content) != content:
            raise InvalidRequestError(
                f"{str(journal.path)!r} has the result of another item with the id {item.id!r}, or of another adapter: "
                "pass another file, or other ids"
            )


async def play_items(
    engine: Engine,
    setup: Setup,
    variant: str,
    items: Sequence[Item],
    seeds: Sequence[int],
    journal: Journal,
    on_progress: Callable[[PlayProgress], None] = lambda progress: None,
    adapter: str = "",
) -> None:
    """Play the items that the journal does not have yet.

    An item that cannot be played, such as one whose view outgrows the model's context, is recorded with its error. An
    error that is not the item's, such as too little KV memory, ends the run; started again, it resumes.

    Args:
        engine: An engine with the variant's method.
        setup: The setup with the variant's options.
        variant: Key of the results.
        items: The inputs.
        seeds: A seed for each item.
        journal: Gets a record for each item.
        on_progress: Called after every item.
        adapter: As for `require_known`.

    Raises:
        ChoreoError: The engine failed, or has too little memory.
    """
    pending = [place for place, item in enumerate(items) if f"{variant} | {item.id}" not in journal]
    finished, started = len(items) - len(pending), time.perf_counter()
    on_progress(PlayProgress(variant, finished))

    async def play_one(place: int) -> None:
        nonlocal finished
        item = items[place]
        record: Record = {"variant": variant, "item": item.id, "content": content_of(item) + adapter}
        try:
            result, spoken, _ = await play(engine, setup, item, seed=seeds[place])
        except KVBudgetError:
            raise
        except InvalidRequestError as error:
            record |= {"error": f"{type(error).__name__}: {error}", "score": 0.0 if item.graded else None}
        else:
            parts = {"answer": result.answer, "score": result.score, "parts": dict(result.parts)}
            record |= parts | {"messages": spoken}
        journal.add(f"{variant} | {item.id}", record)
        finished += 1
        stats = engine.stats()
        tokens = stats.tokens_encoded + stats.tokens_reused + stats.tokens_recomputed
        on_progress(PlayProgress(variant, finished, tokens, time.perf_counter() - started))

    await at_once((partial(play_one, place) for place in pending), room(engine))


def room(engine: Engine) -> int:
    """Return how many items can be played concurrently within the engine's KV budget."""
    tokens = engine.stats().kv_budget_bytes // engine.model.adapter.geometry.bytes_per_token
    return min(AT_ONCE, max(1, tokens // TOKENS_EACH))


async def at_once(jobs: Iterable[Callable[[], Awaitable[T]]], most: int) -> list[T]:
    """Run jobs, at most `most` at a time, and return their results in order; the first error cancels the others."""
    gate = asyncio.Semaphore(most)

    async def gated(job: Callable[[], Awaitable[T]]) -> T:
        async with gate:
            return await job()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(gated(job)) for job in jobs]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
