"""Recorder of one run of a graph: its start, calls, functions, and end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphBubbleUp, GraphInterrupt

from choreo_agents.engine import Engine
from choreo_agents.engine.recording.format import Outcome, RecordedNode, RunEnded, RunStarted
from choreo_agents.engine.recording.recorder import Recorder
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.langgraph_internals import branch_of, is_nested, saved_state_of, superstep_of, thread_of
from choreo_agents.graph.nesting import author_of
from choreo_agents.graph.recording.packing import is_private, pack
from choreo_agents.graph.run_context import CallRequest, CallResult, NodeRun, RunContext
from choreo_agents.graph.view.call_id import options_of

_STOPS = ("interrupt_before", "interrupt_after")


class RecordedRun:
    """Recording of one run of the outermost recorded graph.

    Args:
        recorder: Recorder of an engine that serves it.
        graph: The compiled graph.
        called: Config of the run.
        options: Options of its stream.
    """

    def __init__(self, recorder: Recorder, graph: Any, called: RunnableConfig, options: Mapping[str, Any]) -> None:
        self._recorder, self._graph, self._called, self._options = recorder, graph, called, options
        self._number = recorder.begin_run()
        # A subgraph of an unrecorded graph has no thread of its own.
        self._is_inside = is_nested(called)
        self.saved: Any = None if self._is_inside else saved_state_of(graph, called)
        """Config to get the state of its thread with; None: it has no checkpointer."""

    def with_listener(self, config: RunnableConfig | None) -> RunnableConfig:
        """Return the config of the run, with this recording as a listener."""
        context = RunContext.of(self._called)
        callbacks = (*context.listener.on_call, self._record_call)
        listener = replace(context.listener, on_call=callbacks, around_node=self._record_node)
        return replace(context, listener=listener).into(config)

    def stream(self, parts: Any, graph_input: Any, state: Callable[[], Any]) -> Generator[Any]:
        """Yield the parts of the run's stream, and record its start and end.

        Args:
            parts: Stream of the run.
            graph_input: Filtered input.
            state: Gets the state of its thread.
        """
        self._begin(graph_input, None if self.saved is None else state())
        with self._ending() as end:
            yield from parts
            end(None if self.saved is None else state())

    async def astream(self, parts: Any, graph_input: Any, state: Callable[[], Awaitable[Any]]) -> AsyncGenerator[Any]:
        """Yield as `stream` does, from an async stream."""
        self._begin(graph_input, None if self.saved is None else await state())
        with self._ending() as end:
            async with aclosing(parts):
                async for part in parts:
                    yield part
            end(None if self.saved is None else await state())

    def _begin(self, graph_input: Any, snapshot: Any) -> None:
        recorder, called, builder = self._recorder, self._called, self._graph.builder
        hidden = is_private(graph_input) and not recorder.confidential
        stops = {name: nodes for name in _STOPS if (nodes := self._options.get(name))}
        table = builder.visibility_table().items()
        edges = [(source, reader, rule.words()) for reader, sources in table for source, rule in sources.items()]
        recorder.write(
            RunStarted(
                run=self._number,
                at_s=recorder.at_s(),
                thread=thread_of(called),
                nodes=tuple(sorted(builder.nodes)),
                inside=self._is_inside,
                kept=self.saved is not None,
                seed=options_of(called).seed,
                input=None if hidden else pack(graph_input, builder),
                unknown_start=self._unknown_start(snapshot),
                recursion_limit=called.get("recursion_limit"),
                interrupts={name: nodes if isinstance(nodes, str) else [*nodes] for name, nodes in stops.items()},
                edges=tuple(edges),
            )
        )
        recorder.memory(at_any_rate=True)

    def _unknown_start(self, snapshot: Any) -> str | None:
        if (self._called.get("configurable") or {}).get("checkpoint_id"):
            return "continues from an earlier checkpoint, which is not in the recording"
        thread, begun = thread_of(self._called), self._recorder.threads
        key = (*sorted(self._graph.builder.nodes), thread)
        if snapshot is not None and snapshot.values and key not in begun:
            return (
                f"continues thread {thread!r}, which began before the recording: record the thread from its first run"
            )
        if self.saved is not None:
            begun.add(key)
        return None

    @contextmanager
    def _ending(self) -> Iterator[Callable[[Any], None]]:
        snapshots = list[Any]()
        outcome: Outcome = "left"  # stays on GeneratorExit and CancelledError, which are no `Exception`
        failure: str | None = None
        try:
            yield snapshots.append
            outcome = "interrupted" if any(snapshot is not None and snapshot.next for snapshot in snapshots) else "done"
        except Exception as error:
            outcome, failure = "failed", type(error).__name__
            raise
        finally:
            self._recorder.memory(at_any_rate=True)
            at_s = self._recorder.at_s()
            self._recorder.write(RunEnded(run=self._number, at_s=at_s, outcome=outcome, error=failure))

    def _record_call(self, request: CallRequest, result: CallResult) -> None:
        recorder = self._recorder
        answer, *thoughts = request.engine.record.messages(filter(None, (result.handle, result.thought)))
        is_set = result.answer is not None and result.answer.is_set
        is_open = recorder.confidential or not (request.confidential or (request.thinks and not is_set))
        recorder.call(
            request.view,
            answer,
            thoughts[0] if thoughts else None,
            (request.asked_s, result.first_s),
            result.tokens,
            run=self._number,
            **request.place._asdict(),
            step=request.step,
            offsets=tuple(request.offsets),
            position=request.end,
            header_tokens=len(request.turn[0]),
            request=request.request(recorder.digests),
            tokens=result.tokens if is_open else None,
            is_set=is_set,
            sampled=len(result.tokens),
            text=result.words if recorder.confidential or not request.confidential else None,
            finish_reason=result.finish,
        )

    @contextmanager
    def _record_node(self, value: Any, config: RunnableConfig) -> Iterator[NodeRun]:
        """Record the execution of a function."""
        recorder, outcome = self._recorder, "error"
        began_s = recorder.at_s()
        try:
            yield NodeRun()
            outcome = "result"
        except GraphBubbleUp as left:  # an interrupt, or a command to the graph around it
            outcome = "interrupt" if isinstance(left, GraphInterrupt) else ""
            raise
        finally:
            if outcome:
                times: Any = {"outcome": outcome, "began_s": began_s, "ended_s": recorder.at_s()}
                place = {"step": superstep_of(config), "branch": branch_of(config)}
                recorder.write(RecordedNode(run=self._number, node=author_of(config), **place, **times))


def recorded_run(
    graph: Any, called: RunnableConfig, engines: Sequence[Engine], options: Mapping[str, Any]
) -> RecordedRun | None:
    """Return the recording of a run; None: no engine records, or the run is part of a recorded one.

    Args:
        graph: The compiled graph.
        called: Config of the run.
        engines: Engines that serve it.
        options: Options of its stream.

    Raises:
        InvalidRequestError: Several engines record.
    """
    if RunContext.of(called).listener.around_node is not None:
        return None
    recorders = [recorder for engine in engines if (recorder := engine.record.under_way) is not None]
    if len(recorders) > 1:
        raise InvalidRequestError("two engines of one graph are recording: record its runs with one of them")
    return RecordedRun(recorders[0], graph, called, options) if recorders else None
