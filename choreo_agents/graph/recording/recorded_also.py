"""A run that is played and recorded at once: somebody else gives the cues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from choreo_agents.graph.recording.listening import AskedCall, Cue, Listener, NodeExecution, Returned, SaidCall
from choreo_agents.graph.recording.run_recorder import CallCounter, RunRecorder


class RecordedAlso:
    """Listens for two: one gives cues and answers, and one writes down what comes of it.

    Args:
        player: Gives cues, and says what nodes return without being run.
        recorder: Writes.
    """

    def __init__(self, player: Listener, recorder: RunRecorder) -> None:
        self._player, self._recorder = player, recorder

    def cue(self, asked: AskedCall) -> Cue:
        cue = self._player.cue(asked)
        return cue if cue.look is not None else replace(cue, look=self._recorder.cue(asked).look)

    def said(self, asked: AskedCall, cue: Cue, said: SaidCall) -> None:
        self._player.said(asked, cue, said)
        self._recorder.said(asked, cue, said)

    def before(self, execution: NodeExecution) -> Returned | None:
        try:
            returned = self._player.before(execution)
        except BaseException as error:  # an interrupt, or an error, that was recorded
            self._recorder.failed(execution, error, CallCounter())
            raise
        if returned is not None:
            self._recorder.after(execution, returned.value, CallCounter())
        return returned

    def inside(self, execution: NodeExecution) -> Listener:
        return self._player.inside(execution)

    def after(self, execution: NodeExecution, value: Any, inside: Listener) -> Any:
        return self._recorder.after(execution, self._player.after(execution, value, inside), inside)

    def failed(self, execution: NodeExecution, error: BaseException, inside: Listener) -> None:
        self._player.failed(execution, error, inside)
        self._recorder.failed(execution, error, inside)
