"""Writes down a run while it is made."""

from __future__ import annotations

import threading
from typing import Any

from langgraph.errors import GraphBubbleUp, GraphInterrupt

from choreo_agents.engine.recording import LogitsDigests, RecordedCall, RecordedNode, Recorder
from choreo_agents.graph.recording.listening import AskedCall, Cue, Listener, NodeExecution, Returned, SaidCall
from choreo_agents.graph.recording.packing import Packing, hides, named, referring, tells


class RunRecorder:
    """Of one run.

    Args:
        recorder: Of the engine that records.
        run: The number of the run.
        packing: Of its graph.
    """

    def __init__(self, recorder: Recorder, run: int, packing: Packing) -> None:
        self._recorder, self._run, self._packing = recorder, run, packing

    def cue(self, asked: AskedCall) -> Cue:
        return Cue(look=self._recorder.logits())

    def said(self, asked: AskedCall, cue: Cue, said: SaidCall) -> None:
        recorder = self._recorder
        shows = recorder.confidential or not asked.confidential
        digests, look, engine = recorder.digests, cue.look, asked.engine
        thought = () if said.thought is None else (said.thought,)
        theirs = engine.record.messages([*asked.handles, said.handle, *thought])
        names = recorder.noted.names(engine.record.digests(digests.key), theirs)
        seen = len(asked.handles)
        spent = engine.usage(said.handle)
        recorder.write(
            RecordedCall(
                run=self._run,
                author=asked.author,
                superstep=asked.superstep,
                branch=asked.branch,
                call=asked.call,
                step=asked.step,
                message=said.message,
                model=engine.model.adapter.fingerprint,
                seed=asked.seed(None),
                read=said.read,
                reads=names[:seen],
                offsets=tuple(asked.offsets),
                end=asked.end,
                made=names[seen],
                thought=names[-1] if thought else None,
                header=asked.header,
                most=said.most,
                asked_s=recorder.at_s(asked.asked_s),
                first_s=None if said.first_s is None else recorder.at_s(said.first_s),
                said_s=recorder.at_s(),
                request=asked.digest(digests.key, None),
                tokens=said.tokens if recorder.confidential or not (asked.confidential or asked.thinks) else None,
                count=len(said.tokens),
                said=digests.of("said", list(said.tokens)),
                words=said.words if shows else None,
                finish=said.finish,
                encoded=spent.tokens_encoded,
                reused=spent.tokens_reused,
                recomputed=spent.tokens_recomputed,
                logits=tuple(look.found) if isinstance(look, LogitsDigests) else None,
            )
        )
        recorder.memory()

    def before(self, execution: NodeExecution) -> Returned | None:
        return None

    def inside(self, execution: NodeExecution) -> Listener:
        return CallCounter()

    def after(self, execution: NodeExecution, value: Any, inside: Listener) -> Any:
        value = named(value, execution.config)
        self._note(execution, "result", value, inside)
        return value

    def failed(self, execution: NodeExecution, error: BaseException, inside: Listener) -> None:
        if isinstance(error, GraphInterrupt):
            asked = [each.value for each in error.args[0]] if error.args else []
            self._note(execution, "interrupt", asked, inside)
        elif isinstance(error, Exception) and not isinstance(error, GraphBubbleUp):
            self._note(execution, "error", type(error).__name__, inside, shows=True)

    def _note(
        self, execution: NodeExecution, outcome: Any, value: Any, inside: Listener, *, shows: bool = False
    ) -> None:
        given = execution.given, execution.state
        told = referring(value, *given)
        called = inside if isinstance(inside, CallCounter) else CallCounter()
        knows = called.heard_confidential or hides(given)
        hidden = not self._recorder.confidential and ((knows and tells(told)) or hides(told))
        masked = hidden and not shows
        self._recorder.write(
            RecordedNode(
                run=self._run,
                node=execution.node,
                step=execution.step,
                branch=execution.branch,
                given=self._recorder.digests.of("given", execution.asked),
                outcome=outcome,
                result=None if masked else self._packing.packed(told),
                masked=masked,
                calls=called.calls,
                began_s=self._recorder.at_s(execution.began_s),
                ended_s=self._recorder.at_s(),
            )
        )


class CallCounter:
    """Listens inside of a function: what it calls is the function's affair, and no part of a recording."""

    def __init__(self) -> None:
        self.calls = 0
        self.heard_confidential = False
        self._lock = threading.Lock()

    def cue(self, asked: AskedCall) -> Cue:
        with self._lock:
            self.calls += 1
            self.heard_confidential = self.heard_confidential or asked.confidential
        return Cue()

    def said(self, asked: AskedCall, cue: Cue, said: SaidCall) -> None:
        pass

    def before(self, execution: NodeExecution) -> Returned | None:
        return None

    def inside(self, execution: NodeExecution) -> Listener:
        return self

    def after(self, execution: NodeExecution, value: Any, inside: Listener) -> Any:
        return value

    def failed(self, execution: NodeExecution, error: BaseException, inside: Listener) -> None:
        pass
