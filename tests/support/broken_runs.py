"""Runs that are broken off at a node and go on elsewhere, and what is heard of them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from langchain_core.runnables.config import merge_configs
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from torch import Tensor

from choreo_agents import ChoreoGraph, Engine, Memory, MessageHandle, RunOptions, Scheduling
from choreo_agents.errors import LineageWarning, UnknownHandleError
from choreo_agents.models import LoadedModel
from support.interference import QUESTION, WARN
from support.visible_graphs import Spec

Place = tuple[str, int, int, int]
"""A call of a run: author, superstep, branch, and which of the node's."""


class Program(Protocol):
    """What a process is sent to run."""

    def graph(self) -> ChoreoGraph: ...


@dataclass(frozen=True)
class Visible:
    """A graph of `visible_graphs` as a program."""

    spec: Spec

    def graph(self) -> ChoreoGraph:
        return self.spec.graph(WARN)


@dataclass(frozen=True)
class Stop:
    """Nodes before and after which a run is broken off."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Leg:
    """A run of a program from where its file has it, or from the beginning, up to a stop or the end."""

    program: Program
    states: str = ""
    """The file; empty: nothing is kept."""
    stop: Stop = Stop()
    begins: bool = False
    from_start: bool = False
    """Whether it goes back to the first state of the file: all nodes run again."""
    adapter: str | None = None
    with_logits: bool = False
    step_tokens: int = 512
    """That a step holds at most."""
    replay: Mapping[Place, tuple[int, ...]] = field(default_factory=dict)
    """Tokens to force."""


@dataclass(frozen=True)
class Said:
    """A message."""

    place: Place
    id: str
    """Which is of its tokens, and of all that it comes from."""
    tokens: tuple[int, ...]
    """Empty: the engine does not know it, as no agent on this leg had to."""
    sampled: tuple[int, ...]
    sees: tuple[tuple[str, int], ...]
    """Ids and relative offsets of its parents."""


@dataclass(frozen=True)
class Heard:
    """What a run has said, in the order of its state."""

    said: tuple[Said, ...]
    words: tuple[tuple[str, str | None, str], ...]
    """Of the messages: type, name and text."""
    waiting: tuple[str, ...]
    """The nodes that it stopped before; none: it has ended."""
    decoded: dict[Place, list[list[float]]]
    """What was really decoded, and the logits before each token if they were asked for."""
    seeds: dict[str, int]
    """That messages were sampled with, by their ids, as far as they were decoded here."""


def heard_on(leg: Leg, model: LoadedModel) -> Heard:
    """Go one leg, on an engine that knows nothing. Whatever had to be encoded again from its words is an error."""
    decoded: dict[Place, list[list[float]]] = {}
    seeds = _Seeds()

    def watch(*place: Any) -> Any:
        def show(logits: Tensor) -> None:
            decoded.setdefault(place, []).append(logits.float().tolist() if leg.with_logits else [])

        return show

    memory, scheduling = Memory(kv_budget_bytes=1 << 23), Scheduling(max_batched_tokens=leg.step_tokens)
    with (
        Engine.load(model, memory=memory, scheduling=scheduling, salt="s") as engine,
        _saver(leg.states) as saver,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", LineageWarning)
        if leg.adapter is not None:
            engine.load_adapter(leg.adapter)
        app = leg.program.graph().compile(
            saver, engine=engine, interrupt_before=[*leg.stop.before], interrupt_after=[*leg.stop.after]
        )
        options = RunOptions(seed=5, logits_callback=watch, replay=defaultdict(lambda: None, leg.replay))
        config: Any = {"configurable": {"thread_id": "1", "choreo": options}, "callbacks": [seeds]}
        start: Any = [*app.get_state_history(config)][-1].config if leg.from_start else {}
        state = app.invoke(QUESTION if leg.begins else None, merge_configs(config, start))
        said = tuple(_said(engine, entry) for entry in state.get("handles") or [])
        words = tuple((message.type, message.name, str(message.text)) for message in state["messages"])
        waiting = app.get_state(config).next
        engine.check()
    return Heard(said, words, tuple(waiting), decoded, seeds.by_handle)


def said_by(broken: Sequence[Heard]) -> list[Said]:
    """All that stands in the last state, each message as some leg has known it."""
    known = {said.id: said for leg in broken for said in leg.said if said.tokens}
    return [replace(known[said.id], place=said.place) for said in broken[-1].said]


def decoded_once(broken: Sequence[Heard]) -> dict[Place, list[list[float]]]:
    """All that was decoded on some leg, and on no other."""
    found: dict[Place, list[list[float]]] = {}
    for leg in broken:
        assert not found.keys() & leg.decoded.keys(), "what has an answer is not decoded again"
        found |= leg.decoded
    return found


@contextmanager
def _saver(states: str) -> Iterator[BaseCheckpointSaver[Any]]:
    if not states:
        yield InMemorySaver()
        return
    with SqliteSaver.from_conn_string(states) as saver:
        yield saver


def _said(engine: Engine, entry: Any) -> Said:
    handle = MessageHandle.model_validate(entry["handle"])
    place = (entry["author"], entry["superstep"], entry["branch"], entry.get("call", 0))
    try:
        message = engine._tenant.find(handle)
    except UnknownHandleError:
        return Said(place, handle.id, (), (), ())
    return Said(
        place,
        handle.id,
        tuple(engine.tokens(handle)),
        tuple(chosen.token for chosen in engine.logprobs(handle)),
        tuple(zip((each.handle.id for each in message.parents), message.relative_offsets, strict=True)),
    )


@dataclass(eq=False)
class _Seeds(BaseCallbackHandler):
    """The seeds that messages were sampled with, by their handles' ids, as traces tell them."""

    by_run: dict[UUID, int] = field(default_factory=dict)
    by_handle: dict[str, int] = field(default_factory=dict)

    def on_chat_model_start(self, *_: Any, run_id: UUID, **told: Any) -> None:
        self.by_run[run_id] = told["invocation_params"]["seed"]

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        [[said]] = response.generations
        self.by_handle[said.message.response_metadata["choreo"]["handle"]] = self.by_run[run_id]  # type: ignore[union-attr]
