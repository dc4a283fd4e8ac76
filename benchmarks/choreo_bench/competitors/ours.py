"""The engine itself, through its public calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from choreo_agents.engine import Decode, Engine, Memory, Scheduling
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.tracing import Event, StepRan
from choreo_bench.competitors.base import Levels, Timer, paths


class Ours:
    """An engine with room for the largest case."""

    name = "choreo"

    def __init__(self, model: LoadedModel, kv_tokens: int) -> None:
        self._steps: list[StepRan] = []
        budget = kv_tokens * model.adapter.geometry.bytes_per_token
        self._engine = Engine.load(
            model, memory=Memory(kv_budget_bytes=budget), scheduling=Scheduling(max_batched_tokens=4096), sink=self._see
        )
        self._seeds = itertools.count()

    def _see(self, event: Event) -> None:
        if isinstance(event, StepRan):
            self._steps.append(event)

    def first_token(self, messages: Sequence[Sequence[int]], order: Sequence[int], new: Sequence[int]) -> Timer:
        engine = self._engine
        handles = [engine.prefill(list(tokens)) for tokens in messages]
        view = [handles[index] for index in order]
        # The new tokens are the header: the first answer token is sampled after the last of them.
        sampling = Sampling(temperature=0.0, max_tokens=1, stop_tokens=())

        def timer() -> float:
            answer = engine.decode(list(new), view, sampling=sampling)
            took = engine.usage(answer).ttft_s
            engine.release(answer)
            assert took is not None
            return took

        return timer

    def decode(self, levels: Levels, branches: int, steps: int) -> Timer:
        engine = self._engine
        made: dict[tuple[tuple[int, int], ...], MessageHandle] = {}
        views: list[list[MessageHandle]] = []
        for path in paths(levels, branches):
            view: list[MessageHandle] = []
            for depth, (level, index) in enumerate(path):
                node = path[: depth + 1]
                if node not in made:
                    made[node] = engine.prefill(list(levels[level][index]), view)
                view = [*view, made[node]]
            views.append(view)

        def timer() -> float:
            sampling = Sampling(temperature=0.0, max_tokens=steps + 1, stop_tokens=())
            calls = [
                Decode([3 + branch], view, sampling=sampling.model_copy(update={"seed": next(self._seeds)}))
                for branch, view in enumerate(views)
            ]
            self._steps.clear()
            for answer in engine.decode(calls):
                engine.release(answer)
            ran = [event.time_s for event in self._steps if event.decode_rows == branches]
            return (ran[-1] - ran[0]) / (len(ran) - 1)

        return timer

    def close(self) -> None:
        self._engine.close()
