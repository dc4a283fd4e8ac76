"""Runs that were really made and recorded, and their pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage
from typer.testing import CliRunner

from choreo_agents import END, START, Agent, ChoreoGraph, Engine, Memory, Sampling, Schema, fork
from choreo_agents.cli import app
from choreo_agents.engine.recording.format import Recording, read_recording
from choreo_agents.workflows import debate, tree_of_thoughts
from support.recorded import calling, save_caller

NOTES = {"Ann": "Ann has 3 red kites.", "Bob": "Bob has 5 blue boats.", "Cleo": "Cleo has 9 green drums."}
QUESTION = {"messages": [("user", "What does Bob have?")]}
FREE = Sampling(temperature=0.8, max_tokens=12)


@dataclass
class Looked:
    """A recording, and the page that `choreo inspect run` makes of it."""

    recording: Recording
    page: Path
    stats: Any
    """Of the engine that ran it, once it was over."""


def page_for(recording: Path, *options: str) -> Path:
    """What the command writes."""
    page = recording.with_suffix(".html")
    ran = CliRunner().invoke(app, ["inspect", "run", str(recording), "--html", str(page), *options])
    assert ran.exit_code == 0, ran.output
    return page


def looking() -> ChoreoGraph:
    """An agent, a function that looks something up, one that reads both, and one whose words are encoded again."""
    graph = ChoreoGraph(system="Agents read their notes and answer the question.")
    graph.add_node(Agent("Ann", system=NOTES["Ann"], sampling=FREE))
    graph.add_node("look", lambda _: {"messages": [AIMessage(NOTES["Bob"])]})
    graph.add_node(Agent("Bob", sampling=FREE, reads={"Ann": "shared"}))
    graph.add_node(Agent("Cleo", sampling=FREE, reads={"Ann": "reencoded", "Bob": "reencoded"}))
    graph.add_edge(START, "Ann", visibility="reencoded").add_edge("Ann", "look", visibility={})
    return graph.add_edge("look", "Bob").add_edge("Bob", "Cleo", visibility="reencoded").add_edge("Cleo", END)


def _recorded(folder: Path, name: str, graph: Any, given: Any = QUESTION, model: str | Path = "embedded") -> Looked:
    path = folder / f"{name}.jsonl"
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 26)) as engine:
        compiled = graph.compile(engine=engine)
        with engine.record(path):
            compiled.invoke(given)
        stats = engine.stats()
    return Looked(read_recording(path), page_for(path), stats)


def _debate(folder: Path, _: dict[str, Looked]) -> Looked:
    return _recorded(folder, "debate", debate(NOTES, rounds=2, sampling=FREE))


def _tree(folder: Path, _: dict[str, Looked]) -> Looked:
    return _recorded(folder, "tree", tree_of_thoughts())


def _look(folder: Path, _: dict[str, Looked]) -> Looked:
    return _recorded(folder, "look", looking())


def _tools(folder: Path, _: dict[str, Looked]) -> Looked:
    return _recorded(folder, "tools", calling(), model=save_caller(folder / "caller"))


def _modules(folder: Path, _: dict[str, Looked]) -> Looked:
    schema = Schema.from_text("""
    <schema name="team">
      <module name="rules"><system>Answer from the notes.</system></module>
      <module name="bags"><system>Notes: Ann has 7 green bags. Bob has 3 gold keys.</system></module>
    </schema>
    """)
    graph = ChoreoGraph()
    graph.add_node(Agent("scout", prompt=schema.prompt("<rules/>"), sampling=FREE))
    graph.add_node(Agent("guide", prompt=schema.prompt("<rules/><bags/>"), sampling=FREE))
    graph.add_edge(START, "scout").add_edge("scout", "guide", visibility="reencoded")
    return _recorded(folder, "modules", graph.set_visibility(START, "guide", "reencoded"))


def _fork(folder: Path, made: dict[str, Looked]) -> Looked:
    path, first = folder / "fork.jsonl", made["look"].recording
    with Engine.load("embedded") as engine:
        compiled = looking().compile(engine=engine)
        with engine.record(path):
            fork(compiled, first.path, set={"Bob:1.words": "Bob has nothing."})
        stats = engine.stats()
    return Looked(read_recording(path), page_for(path, "--beside", str(first.path)), stats)


RUNS: dict[str, Callable[[Path, dict[str, Looked]], Looked]] = {
    "debate": _debate,
    "tree": _tree,
    "look": _look,
    "tools": _tools,
    "modules": _modules,
    "fork": _fork,
}
