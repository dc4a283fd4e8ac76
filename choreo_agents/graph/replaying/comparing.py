"""Plays a recording again, and says what differs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from langchain_core.runnables import RunnableConfig

from choreo_agents.engine.recording import (
    Recording,
    StepNames,
    differences,
    key_of,
    read_recording,
)
from choreo_agents.errors import InvalidRequestError, ReplayError
from choreo_agents.graph.compiled_graph import CompiledChoreoGraph
from choreo_agents.graph.recording.packing import Packing
from choreo_agents.graph.replaying.player import Player, Playing, RecordedFailureError
from choreo_agents.graph.replaying.playing import PlayedRun, Progress, input_of, played, require_playable
from choreo_agents.graph.replaying.reports import ReplayedCall, ReplayReport
from choreo_agents.graph.replaying.script import RunScript
from choreo_agents.graph.replaying.stage import Stage, recorded_engine
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.runtime.timetable import Timetable

Expect = Literal["words", "bits"]


def replay(
    app: CompiledChoreoGraph,
    path: str | Path,
    expect: Expect = "words",
    *,
    run: Collection[str] = (),
    config: RunnableConfig | None = None,
    progress: Progress = lambda done, of: None,
) -> ReplayReport:
    """Play a recording again on an engine of its own, without running its functions, and say what differs.

    Args:
        app: The graph, compiled with an engine of the recording's model. Both stay as they are: a new engine over the
            same model plays, and nothing is written to the graph's checkpointer.
        path: What `engine.record(path)` has written.
        expect: `"words"`: every call is decoded again, with its seed, and its words are compared. `"bits"`: tokens and
            steps are those of the recording, and the logits before each token are compared.
        run: Functions to run after all: names of nodes, or `"tools"`: all of them.
        config: What functions of agents and routes are to find in their config.
        progress: Told how many runs of how many are over.

    Raises:
        ReplayError: It cannot be played here, and why: for bits, each condition that differs.
        InvalidRequestError: It is no recording, or one of another salt.
    """
    return run_coroutine(areplay(app, path, expect, run=run, config=config, progress=progress))


async def areplay(
    app: CompiledChoreoGraph,
    path: str | Path,
    expect: Expect = "words",
    *,
    run: Collection[str] = (),
    config: RunnableConfig | None = None,
    progress: Progress = lambda done, of: None,
) -> ReplayReport:
    """See `replay`."""
    if expect not in ("words", "bits"):
        raise InvalidRequestError(f"expect must be 'words' or 'bits', not {expect!r}")
    recording = read_recording(path)
    require_playable(recording)
    engine = recorded_engine(app, recording.header)
    key = key_of(recording, engine.lineage.seals)
    timetable = None
    if expect == "bits":
        require_same_bits(app, recording, key)
        assert key is not None
        steps = [[((name, number), count) for name, number, count in step.rows] for step in recording.steps()]
        timetable = Timetable(steps)
    runs = {run} if isinstance(run, str) else frozenset(run)
    with Stage(app, recording.header, timetable) as stage:
        digests = None if key is None else stage.engine.record.digests(key)
        if timetable is not None and digests is not None:
            timetable.named = StepNames(digests)
        playing, packing = Playing(digests, expect == "bits", runs), Packing(app.builder)
        players: list[Player] = []
        found: list[str] = []
        for number, each in enumerate(recording.runs):
            player = Player(RunScript(recording, each), packing, playing)
            players.append(player)
            given = input_of(recording, each, packing)
            ended = await played(stage, each, given, player, digests, config, each.seed)
            found += _of_run(recording, player, ended)
            progress(number + 1, len(recording.runs))
            if ended.outcome == "failed" and found:
                break
        steps_run = stage.engine.stats().steps
    return ReplayReport(
        expect,
        tuple(call for player in players for call in _calls(player)),
        sum(player.given for player in players),
        tuple(name for player in players for name in player.ran),
        tuple(found),
        tuple(_notes(recording, key, players)),
        steps_run,
    )


def require_same_bits(app: CompiledChoreoGraph, recording: Recording, key: bytes | None) -> None:
    """Raise `ReplayError` if a recording's bits cannot come again here."""
    header, here = recording.header, recorded_engine(app, recording.header).record.conditions()
    why = list(differences(header.conditions, here))
    if not header.bits:
        why.append("the recording has no bits: record(path, bits=True)")
    if key is None:
        why.append(f"there is no {recording.path.name}.key beside the recording, under which its digests are made")
    if len(getattr(app.builder, "engines", ())) > 1:
        why.append("several engines serve the graph, and the steps of one are recorded")
    if recording.overlapping():
        why.append("its runs were made side by side: in which order their calls came is not recorded")
    if any(step.others for step in recording.steps()):
        why.append("other tenants were served in the same steps")
    if callers := sorted({node.node for node in recording.nodes() if node.calls}):
        why.append(f"{', '.join(callers)} made calls of agents itself, which are not recorded")
    if why:
        raise ReplayError(f"{str(recording.path)!r} cannot be compared bit by bit here: {'; '.join(why)}")


def _of_run(recording: Recording, player: Player, ended: PlayedRun) -> Iterator[str]:
    """How a run differs, beside its calls."""
    script = player.script
    where = f"run {script.run.run + 1}"
    if ended.before is not None and script.run.before is not None and ended.before != script.run.before:
        yield f"{where} began in another state: its thread was changed between two runs, or its words differ"
    if ended.error is not None and not isinstance(ended.error, RecordedFailureError):
        then = script.ended
        if then is None or then.outcome != "failed" or then.error != type(ended.error).__name__:
            yield f"{where} stopped: {ended.error}"
            return
    if script.ended is None or script.is_open or ended.outcome == "cut":
        return
    if ended.outcome != script.ended.outcome:
        yield f"{where} ended otherwise: recorded {script.ended.outcome}, now {ended.outcome}"
    elif None not in (ended.state, script.ended.state) and ended.state != script.ended.state:
        yield f"{where} ended in another state"


def _calls(player: Player) -> list[ReplayedCall]:
    """In order, with those that were not made."""
    missing = []
    if not player.script.is_open:
        run = player.script.run.run
        missing = [
            ReplayedCall(run, call.place, call.words, None, "it was not made") for call in player.script.unused()
        ]
    return sorted([*player.calls, *missing], key=lambda call: (call.place[1], call.place))


def _notes(recording: Recording, key: bytes | None, players: list[Player]) -> Iterator[str]:
    if recording.cut is not None:
        yield f"the recording is not whole: {recording.cut}; it was played up to there"
    if key is None:
        what = "masked words and states" if any(player.compared_without_key for player in players) else "states"
        yield f"{what} were not compared: there is no {recording.path.name}.key beside the recording"
