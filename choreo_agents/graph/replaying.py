"""Runs a graph again over the answers of a record."""

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
from choreo_agents.graph.recording.packing import Packing
from choreo_agents.graph.run_context import Answer, CallRequest, CallResult, RunContext, RunListener
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.graph.view.call_id import RunOptions
from choreo_agents.models import PromptText
from choreo_agents.tracing import table_html

Place = tuple[str, int, int, int]
"""Author, superstep, branch and call."""
_EVERYWHERE = "*"
"""In the place of nodes to stop at: all of them."""
_MEANT = "run.seed, input, NODE.system, NODE.prompt or NODE:NUMBER.words"


@dataclass(frozen=True)
class ReplayedCall:
    """One call, beside what was recorded of it."""

    run: int
    place: Place
    outcome: Literal["taken", "same", "changed", "new", "set"]
    """The record had its answer; it was decoded, and says the same as in the record, or something else; the record has
    no call in its place; its words were set."""
    differs: tuple[str, ...]
    """What of its request is not as in the record, unless that had its answer: `turn`, `model`, `sampling`, `seed`, and
    `view`, with those whose messages in it are others, as in `view (alice, bob)`."""
    recorded: str | None
    """Its words then; None: they are masked, or it was not made."""
    words: str | None
    """Its words now; None: it is confidential."""
    sampled: int
    """Tokens that were sampled for it."""

    @property
    def same(self) -> bool:
        """Whether it was asked, and has said, what the record has."""
        return self.outcome in ("taken", "same") and not self.differs


@dataclass(frozen=True)
class ReplayReport:
    """What a replay or a fork came to."""

    calls: tuple[ReplayedCall, ...]
    """In the order of runs and supersteps."""
    gone: tuple[Place, ...]
    """Recorded calls that were not made."""
    sampled: int
    """Tokens that were sampled, ..."""
    taken: int
    """... and tokens that were taken from the record, which no step has sampled."""
    values: Mapping[str, Any] = field(repr=False)
    """The state in which the last run ended."""
    differences: tuple[str, ...]
    """Runs that ended otherwise than in the record."""
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences and not self.gone and all(call.same for call in self.calls)

    @property
    def changed(self) -> tuple[ReplayedCall, ...]:
        """The messages that are not as recorded."""
        return tuple(call for call in self.calls if call.outcome in ("changed", "new", "set"))

    def _repr_html_(self) -> str:
        columns = ("run", "agent", "superstep", "outcome", "what differs", "recorded", "now")
        rows = (
            (each.run + 1, *each.place[:2], each.outcome, ", ".join(each.differs), each.recorded, each.words)
            for each in self.calls
        )
        told = f"{len(self.changed)} of {len(self.calls)} messages are not as recorded; {self.sampled} tokens sampled"
        return table_html(told, columns, rows)


class ReplayOptions(TypedDict, total=False):
    """How a graph is run again."""

    nodes: Mapping[str, Any] | None
    """What stands in the place of nodes, by name: functions that look something up in place of calling a service, say.
    Those of subgraphs as in `team|tools`."""
    config: RunnableConfig | None
    """What functions, prompts and routes are to find in their config."""
    context: Any
    """And in their runtime."""
    progress: Callable[[int, int], None]
    """Told how many runs of how many are over."""


@refuses_unknown(ReplayOptions)
def replay(app: CompiledChoreoGraph, path: str | Path, **options: Unpack[ReplayOptions]) -> ReplayReport:
    """Run a graph again over the answers of a record, and say which calls are not as recorded, and why.

    A call that is asked what a recorded call was asked says what that has said, and no step samples it. Any other is
    decoded. Functions and tools run, unless others stand in their place.

    Args:
        app: The graph, compiled with an engine of the record's model. It is run in threads of its own, which nothing
            keeps: its checkpointer and its store's lineage stay as they are.
        path: What `engine.record(path)` has written.
        **options: See `ReplayOptions`.

    Raises:
        ReplayError: The record cannot be run again here, and why.
        InvalidRequestError: It is no record, or one of another salt.
    """
    return run_coroutine(afork(app, path, set={}, **options))


@refuses_unknown(ReplayOptions)
async def areplay(app: CompiledChoreoGraph, path: str | Path, **options: Unpack[ReplayOptions]) -> ReplayReport:
    """See `replay`."""
    return await afork(app, path, set={}, **options)


@refuses_unknown(ReplayOptions)
def fork(
    app: CompiledChoreoGraph,
    path: str | Path,
    *,
    set: Mapping[str, Any],  # noqa: A002 - as the command has it
    **options: Unpack[ReplayOptions],
) -> ReplayReport:
    """The same with a change: what that can reach is decoded, and all else is found.

    Args:
        app: As for `replay`, and so is what is not said here.
        path: The record.
        set: What is changed, by name: `alice.system` and `alice.prompt` of a node or persona, in all of its calls;
            `alice:2.words`, what it says the second time; `run.seed`; `input`, or the words of its last message.
        **options: As for `replay`.

    Raises:
        ReplayError: The record cannot be run again here.
        InvalidRequestError: Nothing of that name can be set, or it is no record.
    """
    return run_coroutine(afork(app, path, set=set, **options))


@refuses_unknown(ReplayOptions)
async def afork(
    app: CompiledChoreoGraph,
    path: str | Path,
    *,
    set: Mapping[str, Any],  # noqa: A002
    **options: Unpack[ReplayOptions],
) -> ReplayReport:
    """See `fork`."""
    require_compiled(app)
    changes, recording, progress = _changes_of(set), read_recording(path), options.get("progress")
    builder, header = cast(Any, app.builder), recording.header
    runs = [run for run in recording.runs if not run.inside and not {*run.nodes}.isdisjoint(builder.nodes)]
    if not runs:
        raise ReplayError(f"{str(recording.path)!r} has no run of this graph")
    _require_begun(recording, runs)
    engine = recorded_engine(app, header)
    digests = engine.record.digests(key_of(recording, engine.lineage.seals))
    words = {id(call_named(recording, *whose)): said for whose, said in changes.words.items()}
    copied, suffix = GraphCopy(changes.told, options.get("nodes")), secrets.token_hex(4)
    # What a run says that no thread keeps is proven in the next such run, which may be given it: in no thread either.
    graphs = {kept: copied.compiled(app, kept=kept) for kept in (True, False)}
    made: list[_RunAnswers] = []
    values: Mapping[str, Any] = {}
    differences: list[str] = []
    with ExitStack() as held:
        for each in builder.engines:
            held.enter_context(each.scope())
            held.callback(each.record.drop_digests, digests.key)
        for number, run in enumerate(runs):
            made.append(answers := _RunAnswers(recording, run, digests, words))
            seeds = changes.seed, run.seed, None if engine.seed == header.seed else header.seed
            own: Any = {"choreo": RunOptions(next((seed for seed in seeds if seed is not None), None))}
            if run.thread is not None:
                own["thread_id"] = f"{run.thread} {suffix}" if run.kept else run.thread
            called = merge_configs(options.get("config"), {"configurable": own})
            if run.recursion_limit is not None:
                called["recursion_limit"] = run.recursion_limit
            graph, listening = graphs[run.kept], RunListener(answers.answer, (answers.said,))
            called = replace(RunContext.of(called_with(graph, called)), listening=listening).into(called)
            given = _given(recording, run, Packing(builder), None if number else changes.given)
            values, outcome = await _made(graph, run, given, called, answers, options.get("context"))
            if answers.ended is not None and not answers.is_open and outcome != answers.ended.outcome:
                differences.append(f"run {run.run + 1} ended otherwise: {answers.ended.outcome} then, {outcome} now")
            if progress is not None:
                progress(number + 1, len(runs))
    calls = [call for run in made for call in sorted(run.calls, key=lambda call: (call.place[1], call.place))]
    return ReplayReport(
        tuple(calls),
        tuple(call.place for run in made for call in run.gone),
        sum(call.sampled for call in calls),
        sum(run.taken for run in made),
        values,
        tuple(differences),
        tuple(_notes(recording, runs, made, len(changes.words))),
    )


def recorded_engine(app: CompiledChoreoGraph, header: RecordingHeader) -> Engine:
    """The engine of a graph that runs the model of a record; raises `ReplayError` if none does."""
    engines: Sequence[Engine] = cast(Any, app.builder).engines
    for engine in engines:
        if engine.model.adapter.fingerprint == header.fingerprint:
            return engine
    here = ", ".join(f"{engine.model.name!r} ({engine.model.adapter.fingerprint})" for engine in engines)
    raise ReplayError(
        f"recorded with the model {header.model!r} ({header.fingerprint}), here is {here or 'none'}: compile the graph "
        "with an engine of that model and dtype"
    )


def _require_begun(recording: Recording, runs: Sequence[RunStarted]) -> None:
    """Raise `ReplayError` if a run goes on from what is not in the record."""
    begun: set[str | None] = set()
    for run in runs:
        where = f"run {run.run + 1} of {str(recording.path)!r}"
        if run.travels:
            raise ReplayError(f"{where} goes on from an earlier checkpoint, which is not in the record")
        if run.goes_on and run.thread not in begun:
            raise ReplayError(
                f"{where} goes on with thread {run.thread!r}, which began before the record: record it from its first "
                "run"
            )
        begun |= {run.thread} if run.kept else set()


def _given(recording: Recording, run: RunStarted, packing: Packing, changed: Any) -> Any:
    """The input of a run, or another in its place, whose text takes the place of its last message's."""
    if changed is not None and not isinstance(changed, str):
        return changed
    if run.given is None:
        raise ReplayError(
            f"the input of run {run.run + 1} of {str(recording.path)!r} is not in the record, since it is confidential "
            "or of types that the graph's schemas do not name: record(path, confidential=True)"
        )
    given = packing.unpacked(run.given)
    if changed is None:
        return given
    if given is not None and not isinstance(given, Mapping):
        raise InvalidRequestError(
            f"the input of the run is a {type(given).__name__}, whose words cannot be set: give another input"
        )
    messages: list[BaseMessage | AnyMessage] = [*convert_to_messages((given or {}).get("messages") or [])]
    last = messages[-1].model_copy(update={"content": changed}) if messages else HumanMessage(changed)
    return {**(given or {}), "messages": [*messages[:-1], last]}


async def _made(
    graph: CompiledChoreoGraph, run: RunStarted, given: Any, called: RunnableConfig, answers: _RunAnswers, context: Any
) -> tuple[Mapping[str, Any], str]:
    """Make a run; return the state in which it ended, and how: with an error only if it had one of the kind then."""
    stops: Any = {name: _EVERYWHERE if [*nodes] == [_EVERYWHERE] else nodes for name, nodes in run.interrupts.items()}
    values: Any = {}
    try:
        async for part in graph.astream(given, called, stream_mode="values", context=context, **stops):
            values = part
    except ReplayError:
        raise
    except Exception as failed:
        if answers.ended is None or type(failed).__name__ != answers.ended.error:
            raise
        return values, "failed"
    if not run.kept:
        return values, "done"
    state = await graph.aget_state(called)
    return state.values, "interrupted" if state.next else "done"


def _notes(recording: Recording, runs: Sequence[RunStarted], made: Sequence[_RunAnswers], is_set: int) -> Iterator[str]:
    """What is to be said of a replay in which so many messages were set."""
    if recording.cut is not None:
        yield f"the record is not whole: {recording.cut}; it was run again up to there"
    elif cut := [str(run.run + 1) for run, answers in zip(runs, made, strict=True) if answers.is_open]:
        yield f"nobody waited for the end of run {', '.join(cut)}: it was run again up to there"
    if others := [str(run.run + 1) for run in recording.runs if run not in runs]:
        yield f"run {', '.join(others)} is another graph's, or part of one's, and was not made again"
    said = sum(call.outcome == "set" for run in made for call in run.calls)
    if said < is_set:
        yield f"{is_set - said} of the messages that were set are not said any more"
    if masked := sorted({name for run in made for name in run.masked}):
        yield (
            f"what {', '.join(masked)} said is masked in the record, and was decoded again: record(path, "
            "confidential=True) keeps it"
        )


class EndOfRecord(GraphInterrupt):
    """The record was cut, and the run was made again up to there."""


class _RunAnswers:
    """The answers of a record, given to the calls of one of its runs that is made again. May be used from any thread.

    Args:
        recording: The record.
        run: Of its runs.
        digests: Under its key.
        words: What is said in the place of recorded calls, by their `id()`.
    """

    def __init__(self, recording: Recording, run: RunStarted, digests: Digests, words: Mapping[int, str]) -> None:
        own, self.ended = recording.calls(run.run), recording.ended(run.run)
        self._run, self._digests, self._words = run.run, digests, words
        self._by_request = defaultdict[frozenset[tuple[str, str]], list[RecordedCall]](list)
        for each in [*own, *(call for call in recording.calls() if call.run != run.run)]:
            self._by_request[frozenset(each.asked.items())].append(each)
        self._authors = {each.name: each.author for each in recording.lines if isinstance(each, RecordedMessage)}
        self._lock = threading.Lock()
        self._left = [*own]
        self._matched: dict[int, tuple[dict[str, str], RecordedCall | None, RecordedCall | None]] = {}
        """Of calls under way, by their `id()`: the request; the recorded call in its place; and one that was asked the
        same: that, if it was."""
        self.calls: list[ReplayedCall] = []
        self.taken = 0
        """Tokens."""
        self.masked: set[str] = set()
        """Whose answers the record would have, were they not masked."""

    @property
    def is_open(self) -> bool:
        """Whether more may have happened than the record has: its process ended, or nobody took all that it gave."""
        return self.ended is None or self.ended.outcome == "left"

    @property
    def gone(self) -> list[RecordedCall]:
        """What was said then, and was not asked for now."""
        return [] if self.is_open else self._left

    def answer(self, asked: CallRequest) -> Answer | None:
        """What a call says."""
        request = asked.request(self._digests)
        with self._lock:
            same = self._by_request.get(frozenset(request.items()), [])
            here = [each for each in self._left if each.place == asked.place]
            # Calls in branches of a subgraph, and of one function, have one place.
            recorded = next((each for each in here if each in same), here[0] if here else None)
            if self.is_open and recorded is None:
                raise EndOfRecord(())
            found = recorded if recorded in same else next((each for each in same if not each.is_set), None)
            self._left = [each for each in self._left if each is not recorded]
            self._matched[id(asked)] = request, recorded, found
        if recorded is not None and (words := self._words.get(id(recorded))) is not None:
            return Answer(tuple(asked.engine.model.encode(PromptText.plain(asked.lead + words))), is_set=True)
        if found is None or found.tokens is None:
            return None
        size = asked.engine.model.adapter.vocabulary_size
        is_theirs = all(0 <= token < size for token in found.tokens)
        if not is_theirs or self._digests.of("said", list(found.tokens)) != found.said:
            raise ReplayError(f"what {asked.author!r} says in the record is damaged: its tokens are not the model's")
        return Answer(found.tokens, found.is_set)

    def said(self, asked: CallRequest, said: CallResult) -> None:
        """Compare what a call has said with the record."""
        request, placed, found = self._matched.pop(id(asked))
        is_set = placed is not None and id(placed) in self._words
        recorded = placed if is_set else found or placed
        outcome: Any = "new"
        if is_set:
            outcome = "set"
        elif said.answer is not None:
            outcome = "taken" if said.tokens == said.answer.tokens else "changed"
        elif recorded is not None:
            outcome = "same" if self._digests.of("said", list(said.tokens)) == recorded.said else "changed"
        call = ReplayedCall(
            self._run,
            asked.place,
            outcome,
            () if is_set or found or recorded is None else tuple(self._differs(asked, request, recorded)),
            None if recorded is None else recorded.words,
            None if asked.confidential else said.words,
            0 if said.answer is not None else len(said.tokens),
        )
        with self._lock:
            self.calls.append(call)
            self.taken += len(said.tokens) if outcome == "taken" else 0
            if not is_set and found is not None and found.tokens is None:
                self.masked.add(asked.author)

    def _differs(self, asked: CallRequest, request: Mapping[str, str], recorded: RecordedCall) -> list[str]:
        """What of a call's request is not as it was."""
        differs = [name for name in request if request[name] != recorded.asked.get(name)]
        digests = asked.engine.record.digests(self._digests.key)
        now = {digests.name(each): each.author for each in asked.engine.record.messages(asked.handles)}
        then = {name: self._authors.get(name) for name in recorded.reads}
        others = {author for name, author in [*now.items(), *then.items()] if name not in now or name not in then}
        named = sorted(author for author in others if author)
        told = f"view ({', '.join(named)})" if named else "view"
        return [told if name == "view" else name for name in differs]


@dataclass
class _Changes:
    """What a fork sets."""

    told: dict[str, str] = field(default_factory=dict)
    """`NODE.system` and `NODE.prompt`, by node or persona, behind the subgraphs that they stand in."""
    words: dict[tuple[str, int], str] = field(default_factory=dict)
    """What is said, by agent and which of its calls, from 1."""
    seed: int | None = None
    given: Any = None
    """The input; text is what it asks."""


def _changes_of(given: Mapping[str, Any]) -> _Changes:
    """What a fork is told to set; raises `InvalidRequestError` if that cannot be set."""
    changes = _Changes()
    for name, value in given.items():
        whose, dot, what = name.rpartition(".")
        if name == "input":
            changes.given = value
        elif name == "run.seed":
            try:
                changes.seed = int(value)
            except (TypeError, ValueError):
                raise InvalidRequestError(f"run.seed must be an integer, not {value!r}") from None
        elif dot and what in ("system", "prompt") and isinstance(value, str):
            changes.told[name] = value
        elif dot and what == "words" and isinstance(value, str):
            author, _, number = whose.rpartition(":")
            if not author or not number.isdecimal() or not int(number):
                raise InvalidRequestError(f"name a call as NODE:NUMBER, from 1 on, as in judge:1, not {whose!r}")
            changes.words[author, int(number)] = value
        else:
            raise InvalidRequestError(f"a fork can set {_MEANT}, each to text, not {name!r} to {value!r}")
    return changes


def call_named(recording: Recording, author: str, number: int) -> RecordedCall:
    """Which call of an agent that is, in the order of runs and supersteps; raises `InvalidRequestError`."""
    # As they were said, but for branches of one superstep: whichever of them is the first to end is left to time.
    supersteps: dict[tuple[int, int, int], list[RecordedCall]] = defaultdict(list)
    for call in sorted(recording.calls(), key=lambda call: call.run):
        if call.author == author:
            supersteps[call.run, call.superstep, call.step].append(call)
    said = [call for group in supersteps.values() for call in sorted(group, key=lambda call: (call.branch, call.call))]
    if not said:
        there = ", ".join(sorted({each.author for each in recording.calls()})) or "nobody"
        raise InvalidRequestError(f"{author!r} does not speak in {str(recording.path)!r}: {there} do")
    if number > len(said):
        raise InvalidRequestError(f"{author!r} speaks {len(said)} times in {str(recording.path)!r}, not {number}")
    return said[number - 1]
