"""A run that is recorded: its beginning, its calls and functions, and its end."""

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
from choreo_agents.graph.recording.packing import Packing, is_private
from choreo_agents.graph.run_context import CallRequest, CallResult, RunContext
from choreo_agents.graph.view.call_id import options_of

_STOPS = ("interrupt_before", "interrupt_after")


class RecordedRun:
    """Of one graph, which nothing records that is around it.

    Args:
        recorder: Of an engine that serves it.
        graph: Compiled.
        called: The config that it runs with.
        options: Of its stream.
    """

    def __init__(self, recorder: Recorder, graph: Any, called: RunnableConfig, options: Mapping[str, Any]) -> None:
        self._recorder, self._graph, self._called, self._options = recorder, graph, called, options
        self._number = recorder.begin_run()
        # What stands in a graph that nobody records is begun by that, and its thread is that graph's.
        self._is_inside = is_nested(called)
        self.saved: Any = None if self._is_inside else saved_state_of(graph, called)
        """What to ask for the state of its thread; None: that is not kept."""

    def heard(self, config: RunnableConfig | None) -> RunnableConfig:
        """The config of the run, with who listens."""
        context = RunContext.of(self._called)
        heard = replace(context.listening, said=(*context.listening.said, self._said), ran=self._ran)
        return replace(context, listening=heard).into(config)

    def stream(self, parts: Any, given: Any, state: Callable[[], Any]) -> Generator[Any]:
        """What the run gives, with a line before and one behind it.

        Args:
            parts: What it gives.
            given: Its input, as it was let in.
            state: Asks for the state of its thread.
        """
        self._begin(given, None if self.saved is None else state())
        with self._ending() as end:
            yield from parts
            end(None if self.saved is None else state())

    async def astream(self, parts: Any, given: Any, state: Callable[[], Awaitable[Any]]) -> AsyncGenerator[Any]:
        """The same."""
        self._begin(given, None if self.saved is None else await state())
        with self._ending() as end:
            async with aclosing(parts):
                async for part in parts:
                    yield part
            end(None if self.saved is None else await state())

    def _begin(self, given: Any, snapshot: Any) -> None:
        recorder, called, builder = self._recorder, self._called, self._graph.builder
        hidden = is_private(given) and not recorder.confidential
        stops = {name: nodes for name in _STOPS if (nodes := self._options.get(name))}
        recorder.write(
            RunStarted(
                run=self._number,
                at_s=recorder.at_s(),
                thread=thread_of(called),
                nodes=tuple(sorted(builder.nodes)),
                inside=self._is_inside,
                kept=self.saved is not None,
                seed=options_of(called).seed,
                given=None if hidden else Packing(builder).packed(given),
                goes_on=snapshot is not None and bool(snapshot.values),
                travels=bool((called.get("configurable") or {}).get("checkpoint_id")),
                recursion_limit=called.get("recursion_limit"),
                interrupts={name: [nodes] if isinstance(nodes, str) else [*nodes] for name, nodes in stops.items()},
                edges=tuple(
                    (source, reader, rule.words())
                    for reader, sources in builder.visibility_table().items()
                    for source, rule in sources.items()
                ),
            )
        )
        recorder.memory(at_any_rate=True)

    @contextmanager
    def _ending(self) -> Iterator[Callable[[Any], None]]:
        ended = list[Any]()
        outcome: Outcome = "left"  # if nobody waits for it any more: it was closed, or cancelled
        failure: str | None = None
        try:
            yield ended.append
            outcome = "interrupted" if any(snapshot is not None and snapshot.next for snapshot in ended) else "done"
        except Exception as error:
            outcome, failure = "failed", type(error).__name__
            raise
        finally:
            self._recorder.memory(at_any_rate=True)
            at_s = self._recorder.at_s()
            self._recorder.write(RunEnded(run=self._number, at_s=at_s, outcome=outcome, error=failure))

    def _said(self, asked: CallRequest, said: CallResult) -> None:
        recorder, records = self._recorder, asked.engine.record
        is_set = said.answer is not None and said.answer.is_set
        is_open = recorder.confidential or not (asked.confidential or (asked.thinks and not is_set))
        recorder.call(
            records,
            asked.handles,
            said.handle,
            said.thought,
            said.tokens,
            (asked.asked_s, said.first_s),
            run=self._number,
            author=asked.author,
            superstep=asked.superstep,
            branch=asked.branch,
            call=asked.call,
            step=asked.step,
            offsets=tuple(asked.offsets),
            end=asked.end,
            header=len(asked.told[0]),
            asked=asked.request(records.digests(recorder.digests.key)),
            tokens=said.tokens if is_open else None,
            is_set=is_set,
            count=len(said.tokens),
            words=said.words if recorder.confidential or not asked.confidential else None,
            finish=said.finish,
        )

    def _ran(self, config: RunnableConfig, began_s: float, error: BaseException | None) -> None:
        """Write down that a function has run."""
        if isinstance(error, GraphBubbleUp) and not isinstance(error, GraphInterrupt):
            return
        self._recorder.write(
            RecordedNode(
                run=self._number,
                node=author_of(config),
                step=superstep_of(config),
                branch=branch_of(config),
                outcome="interrupt" if isinstance(error, GraphInterrupt) else "error" if error else "result",
                began_s=self._recorder.at_s(began_s),
                ended_s=self._recorder.at_s(),
            )
        )


def recorded_run(
    graph: Any, called: RunnableConfig, engines: Sequence[Engine], options: Mapping[str, Any]
) -> RecordedRun | None:
    """A run that is to be recorded; None: nobody records, or it is part of one that is.

    Args:
        graph: Compiled.
        called: The config that it runs with.
        engines: Which serve it.
        options: Of its stream.

    Raises:
        InvalidRequestError: Several of them record.
    """
    if RunContext.of(called).listening.ran is not None:
        return None
    recorders = [found for engine in engines if (found := engine.record.under_way) is not None]
    if len(recorders) > 1:
        raise InvalidRequestError("two engines of one graph are recording: record its runs with one of them")
    return RecordedRun(recorders[0], graph, called, options) if recorders else None
