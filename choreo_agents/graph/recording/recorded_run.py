"""The beginning and the end of a run that is recorded."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.engine import Engine
from choreo_agents.engine.recording import Outcome, Recorder, RunEnded, RunStarted
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.langgraph_internals import is_nested, saved_state_of, thread_of
from choreo_agents.graph.recording.packing import Packing, hides
from choreo_agents.graph.recording.run_recorder import RunRecorder
from choreo_agents.graph.run_context import RunContext
from choreo_agents.graph.view.run_options import options_of

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
        self._packing = Packing(graph.builder)
        # What stands in a graph that nobody records is begun by that, and its thread is that graph's.
        self._is_inside = is_nested(called)
        saved = None if self._is_inside else saved_state_of(graph, called)
        self._is_kept = saved is not None
        self.saved: RunnableConfig = saved or {}
        """What to ask for the state of its thread, if that is kept."""

    def heard(self, config: RunnableConfig | None) -> RunnableConfig:
        """The config of the run, with who listens."""
        run, context = RunRecorder(self._recorder, self._number), RunContext.of(self._called)
        heard = replace(context.listening, said=(*context.listening.said, run.said), ran=run.ran)
        return replace(context, listening=heard).into(config)

    def stream(self, parts: Any, given: Any, state: Callable[[], Any]) -> Generator[Any]:
        """What the run gives, with a line before and one behind it.

        Args:
            parts: What it gives.
            given: Its input, as it was let in.
            state: Asks for the state of its thread.
        """
        self._begin(given, state() if self._is_kept else None)
        with self._ending() as end:
            yield from parts
            end(state() if self._is_kept else None)

    async def astream(self, parts: Any, given: Any, state: Callable[[], Awaitable[Any]]) -> AsyncGenerator[Any]:
        """The same."""
        self._begin(given, await state() if self._is_kept else None)
        with self._ending() as end:
            async with aclosing(parts):
                async for part in parts:
                    yield part
            end(await state() if self._is_kept else None)

    def _begin(self, given: Any, snapshot: Any) -> None:
        recorder, called = self._recorder, self._called
        hidden = hides(given) and not recorder.confidential
        stops = {name: self._options.get(name) for name in _STOPS}
        recorder.write(
            RunStarted(
                run=self._number,
                at_s=recorder.at_s(),
                thread=thread_of(called),
                nodes=tuple(sorted(self._graph.builder.nodes)),
                inside=self._is_inside,
                kept=self._is_kept,
                seed=options_of(called).seed,
                given=None if hidden else self._packing.packed(given),
                goes_on=snapshot is not None and bool(snapshot.values),
                travels=bool((called.get("configurable") or {}).get("checkpoint_id")),
                recursion_limit=called.get("recursion_limit"),
                interrupts={
                    name: [nodes] if isinstance(nodes, str) else [*nodes] for name, nodes in stops.items() if nodes
                },
                edges=tuple(
                    (source, reader, rule.words())
                    for reader, sources in self._graph.builder.visibility_table().items()
                    for source, rule in sources.items()
                ),
            )
        )
        recorder.memory(at_any_rate=True)

    @contextmanager
    def _ending(self) -> Iterator[Callable[[Any], None]]:
        ended: list[Any] = []
        try:
            yield ended.append
        except Exception as error:
            self._end("failed", type(error).__name__)
            raise
        except BaseException:  # nobody waits for it any more: it was closed, or cancelled
            self._end("left")
            raise
        snapshot = ended[0] if ended else None
        stopped = snapshot is not None and bool(snapshot.next)
        self._end("interrupted" if stopped else "done")

    def _end(self, outcome: Outcome, error: str | None = None) -> None:
        self._recorder.memory(at_any_rate=True)
        self._recorder.write(RunEnded(run=self._number, at_s=self._recorder.at_s(), outcome=outcome, error=error))


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
