"""Goes on from a recording otherwise: only what the change can reach is computed again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.engine.recording import RecordedCall, Recording, RunStarted, key_of, read_recording
from choreo_agents.errors import ReplayError
from choreo_agents.graph.compiled_graph import CompiledChoreoGraph
from choreo_agents.graph.recording.packing import Packing
from choreo_agents.graph.replaying.changes import (
    Changes,
    call_named,
    changes_of,
    given_otherwise,
    lines_before,
    numbered,
)
from choreo_agents.graph.replaying.fork_player import ForkPlayer
from choreo_agents.graph.replaying.player import Playing, RecordedFailureError
from choreo_agents.graph.replaying.playing import Progress, input_of, played, require_playable, require_untouched
from choreo_agents.graph.replaying.reports import ForkReport
from choreo_agents.graph.replaying.routes import route_change
from choreo_agents.graph.replaying.script import RunScript
from choreo_agents.graph.replaying.stage import Stage, recorded_engine
from choreo_agents.graph.sync_bridge import run_coroutine


def fork(
    app: CompiledChoreoGraph,
    path: str | Path,
    *,
    set: Mapping[str, Any],  # noqa: A002 - as the command has it
    at: str | None = None,
    run: Collection[str] = (),
    config: RunnableConfig | None = None,
    record: str | Path | None = None,
    progress: Progress = lambda done, of: None,
) -> ForkReport:
    """Go on from a recording otherwise, on an engine of its own.

    Calls before the place, and all whose request is as recorded, say what they said: their tokens are encoded as a
    prompt is. Functions whose input is as recorded return what they returned.

    Args:
        app: As for `replay`.
        path: The recording.
        set: What is changed, by name: `alice.system` and `alice.prompt` of a node or persona, in all of its calls;
            `alice:2.words`, what it says the second time; `run.seed`; `input`, or the words of its last message.
        at: Before which call everything stays as it was said, as in `judge:1`. None: from the start.
        run: Functions that may be run if their input has changed: names of nodes, or `"tools"`: all of them.
        config: As for `replay`.
        record: A file that is not there yet, in which the fork is recorded as `engine.record` does.
        progress: As for `replay`.

    Raises:
        ReplayError: It cannot be played here, or a function would have to be run.
        InvalidRequestError: Nothing of that name can be set, or it is no recording.
    """
    return run_coroutine(afork(app, path, set=set, at=at, run=run, config=config, record=record, progress=progress))


async def afork(
    app: CompiledChoreoGraph,
    path: str | Path,
    *,
    set: Mapping[str, Any],  # noqa: A002
    at: str | None = None,
    run: Collection[str] = (),
    config: RunnableConfig | None = None,
    record: str | Path | None = None,
    progress: Progress = lambda done, of: None,
) -> ForkReport:
    """See `fork`."""
    changes, recording = changes_of(set), read_recording(path)
    require_playable(recording)
    require_untouched(recording)
    key = key_of(recording, recorded_engine(app, recording.header).lineage.seals)
    if key is None:
        raise ReplayError(
            f"there is no {recording.path.name}.key beside the recording: without it nobody can tell which calls are "
            "as recorded"
        )
    place = None if at is None else call_named(recording, *numbered(at))
    before = lines_before(recording, place)
    words = {id(call_named(recording, *whose)): said for whose, said in changes.words.items()}
    runs = {run} if isinstance(run, str) else frozenset(run)
    with Stage(app, recording.header, told=changes.told) as stage, ExitStack() as writing:
        if record is not None:
            writing.enter_context(stage.engine.record(record))
        digests, packing = stage.engine.record.digests(key), Packing(app.builder)
        players: list[ForkPlayer] = []
        values: Mapping[str, Any] = {}
        cut: list[int] = []
        for number, each in enumerate(recording.runs):
            player = ForkPlayer(
                RunScript(recording, each),
                packing,
                Playing(digests, runs=runs),
                kept=lambda line: id(line) in before,
                words=words,
                reseeded=changes.seed is not None,
            )
            players.append(player)
            given = _given(recording, each, packing, changes, place)
            seed = each.seed if changes.seed is None else changes.seed
            ended = await played(stage, each, given, player, digests, config, seed)
            if ended.error is not None and not isinstance(ended.error, RecordedFailureError):
                raise ended.error
            values = ended.values
            cut += [number] if ended.outcome == "cut" else []
            progress(number + 1, len(recording.runs))
    calls = [call for player in players for call in player.said_calls()]
    return ForkReport(
        tuple(calls),
        tuple(call.place for player in players for call in player.gone()),
        sum(player.given for player in players),
        tuple(name for player in players for name in player.ran),
        next((found for player in players if (found := route_change(player)) is not None), None),
        sum(call.sampled for call in calls),
        sum(player.taken for player in players),
        values,
        tuple(_notes(recording, cut, players)),
    )


def _given(
    recording: Recording, run: RunStarted, packing: Packing, changes: Changes, place: RecordedCall | None
) -> Any:
    """The input of a run: that which is set is of the run in which the fork begins."""
    is_changed = changes.given is not None and run.run == (0 if place is None else place.run)
    if is_changed and not isinstance(changes.given, str):
        return changes.given
    recorded = input_of(recording, run, packing)
    return given_otherwise(recorded, changes.given) if is_changed else recorded


def _notes(recording: Recording, cut: list[int], players: list[ForkPlayer]) -> Iterator[str]:
    if recording.cut is not None:
        yield f"the recording is not whole: {recording.cut}; it was forked up to there"
    elif cut:
        yield f"nobody waited for the end of run {', '.join(str(number + 1) for number in cut)}: forked up to there"
    if masked := sorted({name for player in players for name in player.masked}):
        yield (
            f"what {', '.join(masked)} said is masked in the recording, and was decoded again: "
            "record(path, confidential=True) keeps it"
        )
