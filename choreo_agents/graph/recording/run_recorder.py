"""Writes down a run while it is made."""

from __future__ import annotations

from langgraph.errors import GraphBubbleUp, GraphInterrupt

from choreo_agents.engine.recording import RecordedCall, RecordedNode, Recorder
from choreo_agents.graph.listening import AskedCall, RanNode, SaidCall


class RunRecorder:
    """Of one run.

    Args:
        recorder: Of the engine that records.
        run: The number of the run.
    """

    def __init__(self, recorder: Recorder, run: int) -> None:
        self._recorder, self._run = recorder, run

    def said(self, asked: AskedCall, said: SaidCall) -> None:
        """Write down a call."""
        recorder, engine = self._recorder, asked.engine
        digests = engine.record.digests(recorder.digests.key)
        thought = () if said.thought is None else (said.thought,)
        names = recorder.noted.names(digests, engine.record.messages([*asked.handles, said.handle, *thought]))
        seen, spent = len(asked.handles), engine.usage(said.handle)
        is_set = said.answer is not None and said.answer.is_set
        is_open = recorder.confidential or not (asked.confidential or (asked.thinks and not is_set))
        recorder.write(
            RecordedCall(
                run=self._run,
                author=asked.author,
                superstep=asked.superstep,
                branch=asked.branch,
                call=asked.call,
                step=asked.step,
                read=sum(handle.length for handle in asked.handles),
                reads=names[:seen],
                offsets=tuple(asked.offsets),
                end=asked.end,
                made=names[seen],
                thought=names[-1] if thought else None,
                header=len(asked.told[0]),
                asked_s=recorder.at_s(asked.asked_s),
                first_s=None if said.first_s is None else recorder.at_s(said.first_s),
                said_s=recorder.at_s(),
                asked=asked.request(digests),
                tokens=said.tokens if is_open else None,
                is_set=is_set,
                count=len(said.tokens),
                said=digests.of("said", list(said.tokens)),
                words=said.words if recorder.confidential or not asked.confidential else None,
                finish=said.finish,
                encoded=spent.tokens_encoded,
                reused=spent.tokens_reused,
                recomputed=spent.tokens_recomputed,
            )
        )
        recorder.memory()

    def ran(self, node: RanNode) -> None:
        """Write down that a function has run."""
        if isinstance(node.error, GraphBubbleUp) and not isinstance(node.error, GraphInterrupt):
            return
        self._recorder.write(
            RecordedNode(
                run=self._run,
                node=node.node,
                step=node.step,
                branch=node.branch,
                outcome="interrupt" if isinstance(node.error, GraphInterrupt) else "error" if node.error else "result",
                began_s=self._recorder.at_s(node.began_s),
                ended_s=self._recorder.at_s(),
            )
        )
