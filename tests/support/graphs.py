"""Graphs that several tests run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from choreo_agents import END, START, Agent, ChoreoGraph, MessageHandle, Sampling

FREE = Sampling(temperature=1.0, max_tokens=24, stop_tokens=())
SHORT = Sampling(max_tokens=6, stop_tokens=())
QUESTION = {"messages": [("user", "What does Ann have?")]}


def agent(name: str, **options: Any) -> Agent:
    """An agent that says little."""
    return Agent(name, **({"sampling": SHORT} | options))


def branches(names: Iterable[str], sampling: Sampling = FREE) -> ChoreoGraph:
    """Agents that all answer at once."""
    graph = ChoreoGraph(system="Agents read their notes.")
    for name in names:
        graph.add_node(Agent(name, system=f"Notes: Ann has 3 red kites. {name}", sampling=sampling))
        graph.add_edge(START, name)
        graph.add_edge(name, END)
    return graph


def said(engine: Any, state: dict[str, Any]) -> dict[str, list[int]]:
    """Tokens of each author's last message."""
    handles = {entry["author"]: MessageHandle.model_validate(entry["handle"]) for entry in state["handles"]}
    return {author: engine.tokens(handle) for author, handle in handles.items()}


def speakers_of(engine: Any, state: dict[str, Any], author: str) -> list[tuple[str | None, str]]:
    """Author and words of all that an author's last message attended to."""
    entry = [each for each in state["handles"] if each["author"] == author][-1]
    parents = engine._tenant.find(MessageHandle.model_validate(entry["handle"])).parents
    return [(parent.author, engine.model.decode(list(parent.tokens), special=False).strip()) for parent in parents]


def words_seen(engine: Any, state: dict[str, Any], author: str) -> str:
    """All that an author's last message attended to, special tokens included."""
    entry = [each for each in state["handles"] if each["author"] == author][-1]
    parents = engine._tenant.find(MessageHandle.model_validate(entry["handle"])).parents
    return "".join(engine.model.decode(list(parent.tokens)) for parent in parents)


def authors_of(state: dict[str, Any]) -> dict[str, str]:
    """Who said each message, by its id, as the entries have it."""
    return {entry["message_id"]: entry["author"] for entry in state["handles"]}
