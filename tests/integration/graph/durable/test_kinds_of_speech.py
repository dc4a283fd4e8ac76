"""Whatever agents do, another process goes on with it: thoughts, workers, merges, adapters, two models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEngine
from langgraph.checkpoint.sqlite import SqliteSaver
from support.adapters import save_adapter
from support.graphs import FREE
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama
from support.two_models import entry_of

from choreo_agents import END, START, Agent, ChoreoGraph, Engine, Memory, MessageHandle, Sampling, Synthesizer, Worker
from choreo_agents.errors import LineageWarning

THREAD: Any = {"configurable": {"thread_id": "1"}}
ASKED: Any = {"messages": [("user", "What does Ann have?")]}
Serving = Callable[[], Engine | dict[str, Engine]]


def tokens(engines: Any, state: Any) -> list[list[int]]:
    """Of all that was said, by whichever engine said it."""
    listed = list(engines.values()) if isinstance(engines, dict) else [engines]
    found = []
    for entry in state["handles"]:
        handle = MessageHandle.model_validate(entry["handle"])
        [engine] = [each for each in listed if each.model.adapter.fingerprint == handle.base_model]
        found.append(engine.tokens(handle))
    return found


def goes_on(graph: Callable[[], ChoreoGraph], serving: Serving, stop: str, folder: Path) -> Any:
    """A run that is stopped before a node and goes on in a new engine says what one says that is not stopped.

    Returns:
        The engine that it has ended on, and the state.
    """
    whole = serving()
    with SqliteSaver.from_conn_string(str(folder / "whole")) as saver:
        stays = graph().compile(saver, engine=whole)
        stayed = stays, stays.invoke(ASKED, THREAD)
        expected = tokens(whole, stayed[1])
    with SqliteSaver.from_conn_string(str(folder / "states")) as saver, warnings.catch_warnings():
        warnings.simplefilter("error", LineageWarning)
        graph().compile(saver, engine=serving(), interrupt_before=[stop]).invoke(ASKED, THREAD)
        last = serving()
        app = graph().compile(saver, engine=last)
        state = app.invoke(None, THREAD)
        assert tokens(last, state) == expected
        # What it is made of is known as well.
        assert findings(app, state) == findings(*stayed)
    return last, state


def findings(app: Any, state: Any) -> set[tuple[str, str, str]]:
    return {(each.context, each.reader, each.channel) for each in app.audit(state).findings}


@pytest.mark.parametrize("family", ["Qwen 3", "recalls"])
def test_thoughts(family: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_for(family)
    save_tiny_llama(tmp_path / "model", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(tmp_path / "model")
    made: list[Engine] = []

    def serving() -> Engine:
        made.append(Engine.load(tmp_path / "model", memory=Memory(kv_budget_bytes=1 << 23), salt="s"))
        return made[-1]

    def graph() -> ChoreoGraph:
        graph = ChoreoGraph(system="Be brief.")
        for name in ("ann", "bob", "again"):
            persona = "ann" if name == "again" else name
            sampling = Sampling(temperature=1.0, max_tokens=5)
            graph.add_node(name, Agent(persona, persona=persona, sampling=sampling, thinking=12))
        graph.add_edge(START, "ann").add_edge("ann", "bob").add_edge("bob", "again").add_edge("again", END)
        return graph

    engine, state = goes_on(graph, serving, "bob", tmp_path)
    said = MessageHandle.model_validate(entry_of(state, "ann")["handle"])
    [thought] = engine.inspect.thoughts(said)
    assert engine.inspect.thoughts(said, "ann") == (thought,)
    assert thought.plain() == entry_of(state, "ann")["thoughts"]
    for engine in made:
        engine.check()
        engine.close()


@pytest.mark.parametrize("strategy", ["sequential", "parallel", "summary", "text"])
def test_workers_and_who_merges_them(strategy: Any, make_engine: MakeEngine, tmp_path: Path) -> None:
    def graph() -> ChoreoGraph:
        graph = ChoreoGraph(system="Root.")
        graph.add_node(Worker("poet", n=3, sampling=FREE))
        graph.add_node(Synthesizer("judge", merges=["poet"], strategy=strategy, sampling=FREE))
        graph.add_node(Agent("reader", sampling=FREE))
        graph.add_edge(START, "poet").add_edge("poet", "judge").add_edge("judge", "reader")
        return graph.add_edge("reader", END)

    for stop in ("judge", "reader"):
        (tmp_path / stop).mkdir()
        goes_on(graph, lambda: make_engine(salt="s"), stop, tmp_path / stop)


def test_two_models(make_engine: MakeEngine, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "other", seed=7)

    def serving() -> dict[str, Engine]:
        return {"small": make_engine(salt="s"), "large": make_engine(tmp_path / "other", salt="s")}

    def graph() -> ChoreoGraph:
        graph = ChoreoGraph(system="Root.", visibility="shared")
        for name, engine in (("ann", "small"), ("bob", "large"), ("cleo", "small"), ("dan", "large")):
            graph.add_node(Agent(name, engine=engine, sampling=FREE))
        graph.add_edge(START, "ann").add_edge("ann", "bob").add_edge("bob", "cleo").add_edge("cleo", "dan")
        return graph.add_edge("dan", END)

    goes_on(graph, serving, "cleo", tmp_path)


class TestAdapters:
    @staticmethod
    def graph() -> ChoreoGraph:
        graph = ChoreoGraph(system="Root.")
        graph.add_node(Agent("ann", adapter="fine", sampling=FREE)).add_node(Agent("bob", sampling=FREE))
        return graph.add_edge(START, "ann").add_edge("ann", "bob").add_edge("bob", END)

    def test_go_on_where_they_are_loaded(self, make_engine: MakeEngine, tiny_path: Path, tmp_path: Path) -> None:
        save_adapter(tmp_path / "fine", tiny_path)

        def serving() -> Engine:
            engine = make_engine(salt="s")
            engine.load_adapter(tmp_path / "fine")
            return engine

        goes_on(self.graph, serving, "bob", tmp_path)

    def test_are_named_where_they_are_not(self, make_engine: MakeEngine, tiny_path: Path, tmp_path: Path) -> None:
        save_adapter(tmp_path / "fine", tiny_path)
        first, second = make_engine(salt="s"), make_engine(salt="s")
        first.load_adapter(tmp_path / "fine")
        with SqliteSaver.from_conn_string(str(tmp_path / "states")) as saver:
            self.graph().compile(saver, engine=first, interrupt_before=["bob"]).invoke(ASKED, THREAD)
            with pytest.warns(LineageWarning, match=r"of 'ann' .*the adapter '.*', which is not loaded"):
                self.graph().compile(saver, engine=second).invoke(None, THREAD)
