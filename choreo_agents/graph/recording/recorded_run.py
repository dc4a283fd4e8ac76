"""The beginning and the end of a run that is recorded."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.engine import Engine
from choreo_agents.engine.recording import Digests, Outcome, Recorder, RunEnded, RunStarted
from choreo_agents.graph.langgraph_internals import saved_state_of, saver_of, thread_of, values_in
from choreo_agents.graph.message_names import MessageNames, with_names
from choreo_agents.graph.recording.listening import heard_by, listener_in
from choreo_agents.graph.recording.packing import Packing, canonical, hides
from choreo_agents.graph.recording.run_recorder import RunRecorder
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
        self._values: Any = None
        saved = saved_state_of(graph, called)
        self._is_kept = saved is not None
        self.saved: RunnableConfig = saved or {}
        """What to ask for the state of its thread, if that is kept."""

    @property
    def listener(self) -> RunRecorder:
        """Who writes down what it is told."""
        return RunRecorder(self._recorder, self._number, self._packing)

    def heard(self, config: RunnableConfig | None) -> RunnableConfig:
        """The config of the run, with who listens."""
        named = with_names(config, MessageNames(self._number, self._recorder.digests.key))
        return heard_by(named, self.listener)

    def stream(self, parts: Any, given: Any, state: Callable[[], Any]) -> Generator[Any]:
        """What the run gives, with a line before and one behind it.

        Args:
            parts: What it gives.
            given: Its input, as it was let in.
            state: Asks for the state of its thread.
        """
        self._begin(given, state() if self._is_kept else None)
        with self._ending() as end:
            for part in parts:
                yield self._seen(part)
            end(state() if self._is_kept else None)

    async def astream(self, parts: Any, given: Any, state: Callable[[], Awaitable[Any]]) -> AsyncGenerator[Any]:
        """The same."""
        self._begin(given, await state() if self._is_kept else None)
        with self._ending() as end:
            async with aclosing(parts):
                async for part in parts:
                    yield self._seen(part)
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
                kept=saver_of(self._graph, called) is not None and thread_of(called) is not None,
                seed=options_of(called).seed,
                given=None if hidden else self._packing.packed(given),
                before=self._digest(snapshot),
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
            self._end("failed", None, type(error).__name__)
            raise
        except BaseException:  # nobody waits for it any more: it was closed, or cancelled
            self._end("left", None)
            raise
        snapshot = ended[0] if ended else None
        stopped = snapshot is not None and bool(snapshot.next)
        self._end("interrupted" if stopped else "done", snapshot)

    def _end(self, outcome: Outcome, snapshot: Any, error: str | None = None) -> None:
        self._recorder.memory(at_any_rate=True)
        state = self._digest(snapshot)
        if state is None and self._values is not None:
            state = state_digest(self._recorder.digests, self._values)
        self._recorder.write(
            RunEnded(run=self._number, at_s=self._recorder.at_s(), outcome=outcome, state=state, error=error)
        )

    def _digest(self, snapshot: Any) -> str | None:
        """Of a thread's state; None: it has none."""
        return (
            None if snapshot is None or not snapshot.values else state_digest(self._recorder.digests, snapshot.values)
        )

    def _seen(self, part: Any) -> Any:
        for values in values_in(part, self._options, self._graph.stream_mode):
            self._values = values
        return part


def state_digest(digests: Digests, values: Any) -> str:
    """Of a graph's state, in whatever order its channels come."""
    return digests.of("state", canonical(values))


def recorded_run(
    graph: Any, called: RunnableConfig, engines: Sequence[Engine], options: Mapping[str, Any]
) -> RecordedRun | None:
    """A run that is to be recorded; None: nobody records, or somebody listens already.

    Args:
        graph: Compiled.
        called: The config that it runs with.
        engines: Which serve it.
        options: Of its stream.
    """
    if listener_in(called) is not None:
        return None
    recorder = next((found for engine in engines if (found := engine.record.under_way) is not None), None)
    return None if recorder is None else RecordedRun(recorder, graph, called, options)
