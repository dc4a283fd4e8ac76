"""Plays the runs of a recording, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs

from choreo_agents.engine.recording import Digests, Recording, RunStarted
from choreo_agents.errors import ReplayError
from choreo_agents.graph.message_names import MessageNames, with_names
from choreo_agents.graph.recording.listening import Listener, heard_by
from choreo_agents.graph.recording.packing import Packing
from choreo_agents.graph.recording.recorded_also import RecordedAlso
from choreo_agents.graph.recording.recorded_run import RecordedRun, state_digest
from choreo_agents.graph.replaying.player import EndOfRecordingError
from choreo_agents.graph.replaying.stage import Stage
from choreo_agents.graph.view.run_options import RunOptions

_EVERYWHERE = "*"
"""In the place of nodes to stop at: all of them."""
Progress = Callable[[int, int], None]
"""Told how many runs of how many are over."""


@dataclass(frozen=True)
class PlayedRun:
    """How a run ended that was played."""

    outcome: str
    """As in a recording, or `cut`: at the end of one that was."""
    values: Mapping[str, Any]
    before: str | None
    """A digest of the state that its thread was in."""
    state: str | None
    error: Exception | None


def require_playable(recording: Recording) -> None:
    """Raise `ReplayError` if what a recording has cannot be begun again."""
    begun: set[str | None] = set()
    for run in recording.runs:
        where = f"run {run.run + 1} of {str(recording.path)!r}"
        if run.travels:
            raise ReplayError(f"{where} goes on from an earlier checkpoint, which is not in the recording")
        if run.before is not None and run.thread not in begun:
            raise ReplayError(
                f"{where} goes on with thread {run.thread!r}, which began before the recording: record it from its "
                "first run"
            )
        if run.kept:
            begun.add(run.thread)


def require_untouched(recording: Recording) -> None:
    """Raise `ReplayError` if a thread was changed between two of its runs: that is not in the recording."""
    states: dict[str | None, str | None] = {}
    for run in recording.runs:
        state = states.get(run.thread)
        if run.kept and None not in (state, run.before) and state != run.before:
            raise ReplayError(
                f"the thread {run.thread!r} was changed before run {run.run + 1} of {str(recording.path)!r}, by "
                "update_state or by a run that is not in the recording"
            )
        ended = recording.ended(run.run)
        # Of a run that failed or was left only what was streamed is known, and not what its thread has kept.
        is_known = run.kept and ended is not None and ended.outcome in ("done", "interrupted")
        states[run.thread] = ended.state if is_known and ended is not None else None


def input_of(recording: Recording, run: RunStarted, packing: Packing) -> Any:
    """What a run was given; raises `ReplayError` if the recording does not have it."""
    if run.given is None:
        raise ReplayError(
            f"the input of run {run.run + 1} of {str(recording.path)!r} is not in the recording, since it is "
            "confidential, or of types that the graph's schemas do not name: record(path, confidential=True)"
        )
    return packing.unpacked(run.given)


async def played(
    stage: Stage,
    run: RunStarted,
    given: Any,
    listener: Listener,
    digests: Digests | None,
    config: RunnableConfig | None = None,
    seed: int | None = None,
) -> PlayedRun:
    """Play one run; what is recording on the stage's engine records it, too.

    Args:
        stage: Where.
        run: Which.
        given: Its input.
        listener: Gives cues, and is told what is said.
        digests: Under the recording's key.
        config: What its functions and prompts are to find in their config.
        seed: Of the run.
    """
    app = stage.app(kept=run.kept)
    # Without the key, what a function says that is run may have another id than the results that hand it on.
    config = with_names(config, MessageNames(run.run, b"" if digests is None else digests.key))
    own: dict[str, Any] = {"choreo": RunOptions(seed=seed)}
    own |= {"thread_id": run.thread} if run.thread is not None else {}
    called: Any = merge_configs(config, {"configurable": own})
    if run.recursion_limit is not None:
        called["recursion_limit"] = run.recursion_limit
    values: Any = {}
    outcome, error, before, snapshot = "done", None, None, None
    if run.kept:
        held = await app.aget_state(called)
        before = None if digests is None or not held.values else state_digest(digests, held.values)
    try:
        stops: Any = {
            name: _EVERYWHERE if [*nodes] == [_EVERYWHERE] else nodes for name, nodes in run.interrupts.items()
        }
        recorder = stage.engine.record.under_way
        if recorder is None:
            parts = app.astream(given, heard_by(called, listener), stream_mode="values", **stops)
        else:
            recorded = RecordedRun(recorder, app, called, stops | {"stream_mode": "values"})
            also = heard_by(called, RecordedAlso(listener, recorded.listener))
            parts = app.astream(given, also, stream_mode="values", **stops)
            parts = recorded.astream(parts, given, partial(app.aget_state, called))
        async for part in parts:
            values = part
    except EndOfRecordingError:
        outcome = "cut"
    except Exception as failed:
        outcome, error = "failed", failed
    if run.kept and outcome == "done":
        snapshot = await app.aget_state(called)
        outcome = "interrupted" if snapshot.next else "done"
        values = snapshot.values
    state = None if digests is None or outcome not in ("done", "interrupted") else state_digest(digests, values)
    return PlayedRun(outcome, values, before, state, error)
