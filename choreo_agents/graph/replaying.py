"""Replay of recorded runs: a graph runs again with the answers of a record, or with changes (fork)."""

from __future__ import annotations

import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast

from langchain_core.messages import AnyMessage, BaseMessage, HumanMessage, convert_to_messages
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs
from langgraph.errors import GraphInterrupt

from choreo_agents.arguments import refuses_unknown
from choreo_agents.engine import Engine
from choreo_agents.engine.recording.format import (
    RecordedCall,
    RecordedMessage,
    Recording,
    RecordingHeader,
    RunStarted,
    read_recording,
)
from choreo_agents.engine.recording.recorder import Digests, key_of
from choreo_agents.errors import InvalidRequestError, ReplayError
from choreo_agents.graph.compiled_graph import CompiledChoreoGraph, require_compiled
from choreo_agents.graph.copying import GraphCopy
from choreo_agents.graph.langgraph_internals import called_with
from choreo_agents.graph.recording.packing import unpack
from choreo_agents.graph.run_context import Answer, CallRequest, CallResult, RunContext, RunListener
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.graph.view.call_id import RunOptions
from choreo_agents.models import PromptText
from choreo_agents.tracing import table_html

Place = tuple[str, int, int, int]
"""Author, superstep, branch and call."""
COLUMNS = ("run", "agent", "superstep", "outcome", "what differs", "recorded", "now")
"""Headers of a table of calls."""
_MEANT = "run.seed, input, NODE.system, NODE.prompt or NODE:NUMBER.words"


@dataclass(frozen=True)
class ReplayedCall:
    """A call, compared with the record."""

    run: int
    place: Place
    outcome: Literal["taken", "same", "changed", "new", "set"]
    """`taken` from the record; decoded with the `same` answer or a `changed` one; `new`: not in the record; `set` by a
    fork."""
    differs: tuple[str, ...]
    """Parts of a decoded call's request that differ from the record: `turn`, `model`, `sampling`, `seed`, and `view`
    with the authors of differing messages, as in `view (alice, bob)`."""
    recorded: str | None
    """Recorded text; None: masked, or not in the record."""
    words: str | None
    """Present text; None: confidential."""
    sampled: int
    """Number of sampled tokens."""

    @property
    def same(self) -> bool:
        """True if request and answer are as recorded."""
        return self.outcome in ("taken", "same") and not self.differs

    @property
    def row(self) -> tuple[Any, ...]:
        """Row of a table with `COLUMNS`."""
        recorded = ("" if self.outcome == "new" else "masked") if self.recorded is None else self.recorded
        words = "confidential" if self.words is None else self.words
        return self.run + 1, *self.place[:2], self.outcome, ", ".join(self.differs), recorded, words


@dataclass(frozen=True)
class ReplayReport:
    """Result of a replay or a fork."""

    calls: tuple[ReplayedCall, ...]
    """Calls in the order of runs and supersteps."""
    missing: tuple[Place, ...]
    """Recorded calls that were not made."""
    sampled: int
    """Number of sampled tokens, ..."""
    taken: int
    """... and of tokens that were taken from the record instead."""
    values: Mapping[str, Any] = field(repr=False)
    """Final state of the last run."""
    differences: tuple[str, ...]
    """Runs with another outcome than recorded."""
    notes: tuple[str, ...]
    """Remarks for people, such as that the record was cut."""

    @property
    def same(self) -> bool:
        """True if nothing differs from the record."""
        return not self.differences and not self.missing and all(call.same for call in self.calls)

    @property
    def changed(self) -> tuple[ReplayedCall, ...]:
        """Calls whose answers are not as recorded."""
        return tuple(call for call in self.calls if call.outcome in ("changed", "new", "set"))

    def _repr_html_(self) -> str:
        changed, calls = len(self.changed), len(self.calls)
        title = f"{changed} of {calls} messages differ from the record; {self.sampled} tokens sampled"
        return table_html(title, COLUMNS, (call.row for call in self.calls))


class ReplayOptions(TypedDict, total=False):
    """Options of a replay."""

    nodes: Mapping[str, Any] | None
    """Replacements of nodes by name, `team|tools` in a subgraph: functions that call no service, for instance."""
    config: RunnableConfig | None
    """Config for functions, prompts and routes."""
    context: Any
    """Context of their runtime."""
    progress: Callable[[int, int], None]
    """Called with the number of finished runs, and of all."""


class ForkOptions(ReplayOptions):
    """Options of a fork."""

    set: Mapping[str, Any]
    """Changes by name: `alice.system` and `alice.prompt` of a node or persona, in all its calls; `alice:2.words`, the
    text of its second answer; `run.seed`; `input`, or as text that of its last message."""


@refuses_unknown(ReplayOptions)
def replay(app: CompiledChoreoGraph, path: str | Path, **options: Unpack[ReplayOptions]) -> ReplayReport:
    """Run a graph again with the answers of a record, and report which calls differ, and why.

    A call with the request of a recorded call takes its answer without sampling. Others are decoded. Functions and
    tools run, unless they are replaced.

    Args:
        app: Graph, compiled with an engine of the record's model. It runs in new threads, which are not saved: its
            checkpointer and lineage store stay unchanged.
        path: File that `engine.record(path)` has written.
        **options: See `ReplayOptions`.

    Raises:
        ReplayError: The record cannot be replayed with this graph.
        InvalidRequestError: The file is no record, or was made with another salt.
    """
    return run_coroutine(afork(app, path, set={}, **options))


@refuses_unknown(ReplayOptions)
async def areplay(app: CompiledChoreoGraph, path: str | Path, **options: Unpack[ReplayOptions]) -> ReplayReport:
    """Replay asynchronously; see `replay`."""
    return await afork(app, path, set={}, **options)


@refuses_unknown(ForkOptions)
def fork(app: CompiledChoreoGraph, path: str | Path, **options: Unpack[ForkOptions]) -> ReplayReport:
    """Replay with changes: calls that they can reach are decoded, all others take their recorded answers.

    Args:
        app: See `replay`.
        path: The record.
        **options: See `ForkOptions`.

    Raises:
        ReplayError: The record cannot be replayed with this graph.
        InvalidRequestError: A name cannot be set, or the file is no record.
    """
    return run_coroutine(afork(app, path, **options))


@refuses_unknown(ForkOptions)
async def afork(app: CompiledChoreoGraph, path: str | Path, **options: Unpack[ForkOptions]) -> ReplayReport:
    """Fork asynchronously; see `fork`."""
    require_compiled(app)
    if "set" not in options:
        raise InvalidRequestError("fork requires set=, changes by name such as {'run.seed': 7}: replay() needs none")
    recording, settings, progress = read_recording(path), options["set"], options.get("progress")
    prompts, words, seed = _changes_of(settings, recording)
    builder, header = cast(Any, app.builder), recording.header
    runs = [run for run in recording.runs if not run.inside and not {*run.nodes}.isdisjoint(builder.nodes)]
    if not runs:
        raise ReplayError(f"{str(recording.path)!r} has no run of this graph")
    for run in runs:
        if run.unknown_start is not None:
            raise ReplayError(f"run {run.run + 1} of {str(recording.path)!r} {run.unknown_start}")
    engine = recorded_engine(app, header)
    digests = Digests(key_of(recording, engine.lineage.seals))
    copier, suffix = GraphCopy(prompts, options.get("nodes")), secrets.token_hex(4)
    # Messages of a run without a checkpointer may be input of the next such run, which has to verify their signatures:
    # it must have no checkpointer either.
    graphs = {is_kept: copier.compiled(app, kept=is_kept) for is_kept in (True, False)}
    replayed: list[_RunAnswers] = []
    values: Mapping[str, Any] = {}
    differences: list[str] = []
    with ExitStack() as stack:
        for graph_engine in builder.engines:
            stack.enter_context(graph_engine.scope())
        for number, run in enumerate(runs):
            replayed.append(answers := _RunAnswers(recording, run, digests, words))
            seeds = seed, run.seed, None if engine.seed == header.seed else header.seed
            configurable: Any = {"choreo": RunOptions(next((seed for seed in seeds if seed is not None), None))}
            if run.thread is not None:
                configurable["thread_id"] = f"{run.thread} {suffix}" if run.kept else run.thread
            config = merge_configs(options.get("config"), {"configurable": configurable})
            if run.recursion_limit is not None:
                config["recursion_limit"] = run.recursion_limit
            graph, listener = graphs[run.kept], RunListener(answers.answer, (answers.compare,))
            config = replace(RunContext.of(called_with(graph, config)), listener=listener).into(config)
            graph_input = _input_of(recording, run, builder, None if number else settings.get("input"))
            values, outcome = await _run_again(graph, run, graph_input, config, answers, options.get("context"))
            if answers.ended is not None and not answers.is_open and outcome != answers.ended.outcome:
                differences.append(
                    f"run {run.run + 1} ended otherwise: {answers.ended.outcome} in the record, {outcome} now"
                )
            if progress is not None:
                progress(number + 1, len(runs))
    calls = [call for run in replayed for call in sorted(run.calls, key=lambda call: (call.place[1], call.place))]
    gone = tuple(call.place for run in replayed for call in run.gone)
    sampled, taken = sum(call.sampled for call in calls), sum(run.taken for run in replayed)
    notes = tuple(_notes(recording, runs, replayed, len(words)))
    return ReplayReport(tuple(calls), gone, sampled, taken, values, tuple(differences), notes)


def recorded_engine(app: CompiledChoreoGraph, header: RecordingHeader) -> Engine:
    """Return the graph's engine with the model of a record; raises `ReplayError` if there is none."""
    engines: Sequence[Engine] = cast(Any, app.builder).engines
    for engine in engines:
        if engine.model.adapter.fingerprint == header.fingerprint:
            return engine
    ours = ", ".join(f"{engine.model.name!r} ({engine.model.adapter.fingerprint})" for engine in engines)
    raise ReplayError(
        f"the recording was made with the model {header.model!r} ({header.fingerprint}), this graph runs "
        f"{ours or 'none'}: compile it with an engine of that model and dtype"
    )


def _input_of(recording: Recording, run: RunStarted, builder: Any, changed: Any) -> Any:
    """Return the recorded input of a run, or the changed one; a text replaces that of its last message."""
    if changed is not None and not isinstance(changed, str):
        return changed
    if run.input is None:
        raise ReplayError(
            f"the input of run {run.run + 1} of {str(recording.path)!r} is not in the recording: it is confidential, "
            "or of types that the graph's schemas do not name. Record with record(path, confidential=True)"
        )
    graph_input = unpack(run.input, builder)
    if changed is None:
        return graph_input
    if graph_input is not None and not isinstance(graph_input, Mapping):
        raise InvalidRequestError(
            f"the input of the run is a {type(graph_input).__name__}, whose text cannot be set: pass another input"
        )
    messages: list[BaseMessage | AnyMessage] = [*convert_to_messages((graph_input or {}).get("messages") or [])]
    last = messages[-1].model_copy(update={"content": changed}) if messages else HumanMessage(changed)
    return {**(graph_input or {}), "messages": [*messages[:-1], last]}


async def _run_again(
    graph: CompiledChoreoGraph, run: RunStarted, inputs: Any, config: RunnableConfig, answers: _RunAnswers, context: Any
) -> tuple[Mapping[str, Any], str]:
    """Run the graph, and return final state and outcome; an error counts as one only if the record has its type."""
    values, stops = dict[str, Any](), cast(Any, run.interrupts)
    try:
        async for part in graph.astream(inputs, config, stream_mode="values", context=context, **stops):
            values = part
    except ReplayError:
        raise
    except Exception as error:
        if answers.ended is None or type(error).__name__ != answers.ended.error:
            raise
        return values, "failed"
    if not run.kept:
        return values, "done"
    state = await graph.aget_state(config)
    return state.values, "interrupted" if state.next else "done"


def _notes(recording: Recording, runs: Sequence[RunStarted], again: Sequence[_RunAnswers], n_set: int) -> Iterator[str]:
    """Yield the remarks on a replay in which `n_set` messages were set."""
    if recording.cut is not None:
        yield f"the recording is incomplete: {recording.cut}; it was replayed up to there"
    elif cut := [str(run.run + 1) for run, answers in zip(runs, again, strict=True) if answers.is_open]:
        yield f"run {', '.join(cut)} was not awaited to its end: it was replayed up to there"
    if skipped := [str(run.run + 1) for run in recording.runs if run not in runs]:
        yield f"run {', '.join(skipped)} belongs to another graph, or is part of a run, and was not replayed"
    count = sum(call.outcome == "set" for run in again for call in run.calls)
    if count < n_set:
        yield f"{n_set - count} of the messages that were set do not occur any more"
    if masked := sorted({name for run in again for name in run.masked}):
        yield (
            f"messages of {', '.join(masked)} are masked in the recording, and were decoded again: record(path, "
            "confidential=True) stores them"
        )


class EndOfRecord(GraphInterrupt):
    """Raised where a cut record ends: the run was replayed up to there."""


class _RunAnswers:
    """Answers of a record for the calls of one replayed run; thread-safe.

    Args:
        recording: The record.
        run: The run.
        digests: Digests under the record's key.
        words: Texts that replace the answers of recorded calls, by `id()` of the call.
    """

    def __init__(self, recording: Recording, run: RunStarted, digests: Digests, words: Mapping[int, str]) -> None:
        own, self.ended = recording.calls(run.run), recording.ended(run.run)
        self._run, self._digests, self._words = run.run, digests, words
        self._by_request = defaultdict[frozenset[tuple[str, str]], list[RecordedCall]](list)
        for call in [*own, *(call for call in recording.calls() if call.run != run.run)]:
            self._by_request[frozenset(call.request.items())].append(call)
        self._authors = {line.name: line.author for line in recording.lines if isinstance(line, RecordedMessage)}
        self._lock = threading.Lock()
        self._remaining = [*own]
        self._matched: dict[int, tuple[dict[str, str], RecordedCall | None, RecordedCall | None]] = {}
        """Active calls by `id()`: digests of the request, the recorded call in the same place, and a recorded call of
        the same request, which is the former if that has it."""
        self.calls: list[ReplayedCall] = []
        self.taken = 0
        """Number of tokens that were taken from the record."""
        self.masked: set[str] = set()
        """Authors of calls whose recorded answers are masked."""

    @property
    def is_open(self) -> bool:
        """True if the run's record may be incomplete: the process ended, or the caller closed the stream."""
        return self.ended is None or self.ended.outcome == "left"

    @property
    def gone(self) -> list[RecordedCall]:
        """Recorded calls that were not made."""
        return [] if self.is_open else self._remaining

    def answer(self, request: CallRequest) -> Answer | None:
        """Return the recorded or set answer of a call; None: it has to be decoded."""
        digested = request.request(self._digests)
        with self._lock:
            same = self._by_request.get(frozenset(digested.items()), [])
            candidates = [call for call in self._remaining if call.place == request.place]
            # Calls in branches of a subgraph, or in one function, share a place.
            recorded = next((call for call in candidates if call in same), candidates[0] if candidates else None)
            if self.is_open and recorded is None:
                raise EndOfRecord(())
            match = recorded if recorded in same else next((call for call in same if not call.is_set), None)
            self._remaining = [call for call in self._remaining if call is not recorded]
            self._matched[id(request)] = digested, recorded, match
        if recorded is not None and (words := self._words.get(id(recorded))) is not None:
            return Answer(tuple(request.engine.model.encode(PromptText.plain(request.lead + words))), is_set=True)
        if match is None or match.tokens is None:
            return None
        size = request.engine.model.adapter.vocabulary_size
        is_theirs = all(0 <= token < size for token in match.tokens)
        if not is_theirs or self._digests.of("tokens", list(match.tokens)) != match.digest:
            raise ReplayError(f"the record of {request.place.author!r} is damaged: its tokens are not the model's")
        return Answer(match.tokens, match.is_set)

    def compare(self, request: CallRequest, result: CallResult) -> None:
        """Compare the result of a call with the record."""
        digested, placed, match = self._matched.pop(id(request))
        is_set = placed is not None and id(placed) in self._words
        recorded = placed if is_set else match or placed
        outcome: Any = "new"
        if is_set:
            outcome = "set"
        elif result.answer is not None:
            outcome = "taken" if result.tokens == result.answer.tokens else "changed"
        elif recorded is not None:
            outcome = "same" if self._digests.of("tokens", list(result.tokens)) == recorded.digest else "changed"
        differs = () if is_set or match or recorded is None else tuple(self._differences(request, digested, recorded))
        then, now = None if recorded is None else recorded.text, None if request.confidential else result.words
        sampled = 0 if result.answer is not None else len(result.tokens)
        call = ReplayedCall(self._run, request.place, outcome, differs, then, now, sampled)
        with self._lock:
            self.calls.append(call)
            self.taken += len(result.tokens) if outcome == "taken" else 0
            if not is_set and match is not None and match.tokens is None:
                self.masked.add(request.place.author)

    def _differences(self, request: CallRequest, digested: Mapping[str, str], recorded: RecordedCall) -> list[str]:
        """Return the parts of a call's request that differ from the record."""
        differs = [name for name in digested if digested[name] != recorded.request.get(name)]
        now = {self._digests.name(message): message.author for message in request.view}
        then = {name: self._authors.get(name) for name in recorded.view}
        authors = {author for name, author in [*now.items(), *then.items()] if name not in now or name not in then}
        named = sorted(author for author in authors if author)
        view = f"view ({', '.join(named)})" if named else "view"
        return [view if name == "view" else name for name in differs]


def _changes_of(settings: Mapping[str, Any], recording: Recording) -> tuple[dict[str, str], dict[int, str], int | None]:
    """Return what a fork sets beside its input: prompts by name, answers by `id()` of the recorded call, and the seed.

    Raises:
        InvalidRequestError: One cannot be set.
    """
    prompts, words, seed = dict[str, str](), dict[int, str](), None
    for name, value in settings.items():
        target, dot, attribute = name.rpartition(".")
        if name == "run.seed":
            try:
                seed = int(value)
            except (TypeError, ValueError):
                raise InvalidRequestError(f"run.seed must be an integer, not {value!r}") from None
        elif dot and attribute in ("system", "prompt") and isinstance(value, str):
            prompts[name] = value
        elif dot and attribute == "words" and isinstance(value, str):
            author, _, number = target.rpartition(":")
            if not author or not number.isdecimal() or not int(number):
                raise InvalidRequestError(f"a call must be NODE:NUMBER, from 1, such as judge:1, not {target!r}")
            words[id(call_named(recording, author, int(number)))] = value
        elif name != "input":
            raise InvalidRequestError(f"a fork can set {_MEANT}, each to a text, not {name!r} to {value!r}")
    return prompts, words, seed


def call_named(recording: Recording, author: str, number: int) -> RecordedCall:
    """Return an agent's call by number, in the order of runs and supersteps; raises `InvalidRequestError`."""
    # In recorded order, except within a superstep: the order in which its branches end is random.
    supersteps: dict[tuple[int, int, int], list[RecordedCall]] = defaultdict(list)
    for call in sorted(recording.calls(), key=lambda call: call.run):
        if call.author == author:
            supersteps[call.run, call.superstep, call.step].append(call)
    calls = [call for group in supersteps.values() for call in sorted(group, key=lambda call: (call.branch, call.call))]
    if not calls:
        speakers = ", ".join(sorted({call.author for call in recording.calls()})) or "nobody"
        raise InvalidRequestError(f"{author!r} has no calls in {str(recording.path)!r}: only {speakers}")
    if number > len(calls):
        raise InvalidRequestError(f"{author!r} has {len(calls)} calls in {str(recording.path)!r}, not {number}")
    return calls[number - 1]
