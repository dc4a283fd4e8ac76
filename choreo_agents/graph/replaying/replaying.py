"""Runs a graph again over the answers of a record."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs

from choreo_agents.arguments import refuses_unknown
from choreo_agents.engine import Engine
from choreo_agents.engine.recording.format import Recording, RecordingHeader, RunStarted, read_recording
from choreo_agents.engine.recording.recorder import key_of
from choreo_agents.errors import ReplayError
from choreo_agents.graph.compiled_graph import CompiledChoreoGraph, require_compiled
from choreo_agents.graph.recording.listening import Listening, heard_by
from choreo_agents.graph.recording.packing import Packing
from choreo_agents.graph.replaying.answers import RunAnswers
from choreo_agents.graph.replaying.changes import Changes, call_named, changes_of, given_otherwise
from choreo_agents.graph.replaying.copying import GraphCopy
from choreo_agents.graph.replaying.reports import ReplayReport
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.graph.view.run_options import RunOptions

Progress = Callable[[int, int], None]
"""Told how many runs of how many are over."""
_EVERYWHERE = "*"
"""In the place of nodes to stop at: all of them."""


@refuses_unknown()
def replay(
    app: CompiledChoreoGraph,
    path: str | Path,
    *,
    nodes: Mapping[str, Any] | None = None,
    config: RunnableConfig | None = None,
    context: Any = None,
    progress: Progress = lambda done, of: None,
) -> ReplayReport:
    """Run a graph again over the answers of a record, and say which calls are not as recorded, and why.

    A call that is asked what a recorded call was asked says what that has said, and no step samples it. Any other is
    decoded. Functions and tools run, unless others stand in their place.

    Args:
        app: The graph, compiled with an engine of the record's model. It is run in threads of its own, which nothing
            keeps: its checkpointer and its store's lineage stay as they are.
        path: What `engine.record(path)` has written.
        nodes: What stands in the place of nodes, by name: functions that look something up in place of calling a
            service, say. Those of subgraphs as in `team|tools`.
        config: What functions, prompts and routes are to find in their config.
        context: And in their runtime.
        progress: Told how many runs of how many are over.

    Raises:
        ReplayError: The record cannot be run again here, and why.
        InvalidRequestError: It is no record, or one of another salt.
    """
    return run_coroutine(areplay(app, path, nodes=nodes, config=config, context=context, progress=progress))


@refuses_unknown()
async def areplay(
    app: CompiledChoreoGraph,
    path: str | Path,
    *,
    nodes: Mapping[str, Any] | None = None,
    config: RunnableConfig | None = None,
    context: Any = None,
    progress: Progress = lambda done, of: None,
) -> ReplayReport:
    """See `replay`."""
    return await afork(app, path, set={}, nodes=nodes, config=config, context=context, progress=progress)


@refuses_unknown()
def fork(
    app: CompiledChoreoGraph,
    path: str | Path,
    *,
    set: Mapping[str, Any],  # noqa: A002 - as the command has it
    nodes: Mapping[str, Any] | None = None,
    config: RunnableConfig | None = None,
    context: Any = None,
    progress: Progress = lambda done, of: None,
) -> ReplayReport:
    """The same with a change: what that can reach is decoded, and all else is found.

    Args:
        app: As for `replay`, and so is what is not said here.
        path: The record.
        set: What is changed, by name: `alice.system` and `alice.prompt` of a node or persona, in all of its calls;
            `alice:2.words`, what it says the second time; `run.seed`; `input`, or the words of its last message.
        nodes: As for `replay`.
        config: As for `replay`.
        context: As for `replay`.
        progress: As for `replay`.

    Raises:
        ReplayError: The record cannot be run again here.
        InvalidRequestError: Nothing of that name can be set, or it is no record.
    """
    return run_coroutine(afork(app, path, set=set, nodes=nodes, config=config, context=context, progress=progress))


@refuses_unknown()
async def afork(
    app: CompiledChoreoGraph,
    path: str | Path,
    *,
    set: Mapping[str, Any],  # noqa: A002
    nodes: Mapping[str, Any] | None = None,
    config: RunnableConfig | None = None,
    context: Any = None,
    progress: Progress = lambda done, of: None,
) -> ReplayReport:
    """See `fork`."""
    require_compiled(app)
    changes, recording = changes_of(set), read_recording(path)
    builder: Any = app.builder
    runs = [run for run in recording.runs if not run.inside and not {*run.nodes}.isdisjoint(builder.nodes)]
    if not runs:
        raise ReplayError(f"{str(recording.path)!r} has no run of this graph")
    _require_begun(recording, runs)
    engine = recorded_engine(app, recording.header)
    digests = engine.record.digests(key_of(recording, engine.lineage.seals))
    words = {id(call_named(recording, *whose)): said for whose, said in changes.words.items()}
    copied, packing, suffix = GraphCopy(changes, nodes), Packing(app.builder), secrets.token_hex(4)
    # What a run says that no thread keeps is proven in the next such run, which may be given it: in no thread either.
    graphs = {kept: copied.compiled(app, kept=kept) for kept in (True, False)}
    made: list[RunAnswers] = []
    values: Mapping[str, Any] = {}
    differences: list[str] = []
    with ExitStack() as held:
        for each in builder.engines:
            held.enter_context(each.scope())
        for each in builder.engines:
            held.callback(each.record.drop_digests, digests.key)
        for number, run in enumerate(runs):
            answers = RunAnswers(recording, run, digests, words)
            made.append(answers)
            called = _called(run, _seed(changes, run, recording.header, engine), config, suffix)
            given = _given(recording, run, packing, changes, is_first=not number)
            called = heard_by(called, Listening(answers.answer, (answers.said,)))
            values, outcome = await _made(graphs[run.kept], run, given, called, answers, context)
            if answers.ended is not None and not answers.is_open and outcome != answers.ended.outcome:
                differences.append(f"run {run.run + 1} ended otherwise: {answers.ended.outcome} then, {outcome} now")
            progress(number + 1, len(runs))
    calls = [call for run in made for call in sorted(run.calls, key=lambda call: (call.place[1], call.place))]
    return ReplayReport(
        tuple(calls),
        tuple(call.place for run in made for call in run.gone),
        sum(call.sampled for call in calls),
        sum(run.taken for run in made),
        values,
        tuple(differences),
        tuple(_notes(recording, runs, made, changes)),
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


def _seed(changes: Changes, run: RunStarted, header: RecordingHeader, engine: Engine) -> int | None:
    """The seed of a run; None: its engines have theirs, as they had."""
    own = None if engine.seed == header.seed else header.seed
    return next((seed for seed in (changes.seed, run.seed) if seed is not None), own)


def _called(run: RunStarted, seed: int | None, config: RunnableConfig | None, suffix: str) -> RunnableConfig:
    own: Any = {"choreo": RunOptions(seed=seed)}
    if run.thread is not None:
        own["thread_id"] = f"{run.thread} {suffix}" if run.kept else run.thread
    called = merge_configs(config, {"configurable": own})
    if run.recursion_limit is not None:
        called["recursion_limit"] = run.recursion_limit
    return called


def _given(recording: Recording, run: RunStarted, packing: Packing, changes: Changes, *, is_first: bool) -> Any:
    """The input of a run: what is set is that of the first."""
    is_set = changes.given is not None and is_first
    if is_set and not isinstance(changes.given, str):
        return changes.given
    if run.given is None:
        raise ReplayError(
            f"the input of run {run.run + 1} of {str(recording.path)!r} is not in the record, since it is confidential "
            "or of types that the graph's schemas do not name: record(path, confidential=True)"
        )
    given = packing.unpacked(run.given)
    return given_otherwise(given, changes.given) if is_set else given


async def _made(
    graph: CompiledChoreoGraph, run: RunStarted, given: Any, called: RunnableConfig, answers: RunAnswers, context: Any
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


def _notes(
    recording: Recording, runs: Sequence[RunStarted], made: Sequence[RunAnswers], changes: Changes
) -> Iterator[str]:
    if recording.cut is not None:
        yield f"the record is not whole: {recording.cut}; it was run again up to there"
    elif cut := [str(run.run + 1) for run, answers in zip(runs, made, strict=True) if answers.is_open]:
        yield f"nobody waited for the end of run {', '.join(cut)}: it was run again up to there"
    if others := [str(run.run + 1) for run in recording.runs if run not in runs]:
        yield f"run {', '.join(others)} is another graph's, or part of one's, and was not made again"
    said = sum(call.outcome == "set" for run in made for call in run.calls)
    if said < len(changes.words):
        yield f"{len(changes.words) - said} of the messages that were set are not said any more"
    if masked := sorted({name for run in made for name in run.masked}):
        yield (
            f"what {', '.join(masked)} said is masked in the record, and was decoded again: record(path, "
            "confidential=True) keeps it"
        )
