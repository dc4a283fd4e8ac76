"""Graphs whose runs are recorded: with functions that count how often they are run, with tools, and confidential."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.prebuilt import ToolNode

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState, Command, Engine, RunOptions, Sampling
from choreo_agents.graph.replaying import ReplayReport
from support.tiny import save_tiny_llama
from support.tool_templates import tool_tokenizer

QUESTION = {"messages": [("user", "What does Ann have?")]}
THREAD: Any = {"configurable": {"thread_id": "t"}}
FREE = Sampling(temperature=1.0, max_tokens=6, stop_tokens=())
executions: Counter[str] = Counter()
"""How often each function was run."""


class Counted(ChoreoState, total=False):
    """How often a function has looked."""

    looks: int


@tool
def count(of: Literal["kites", "boats"]) -> str:
    """Count all things."""
    executions["count"] += 1
    return "There are 3 things."


def recorded(engine: Engine, graph: ChoreoGraph, path: Path, **options: Any) -> Any:
    """A graph that is compiled, and one run of it in a recording."""
    app = graph.compile(engine=engine)
    with engine.record(path, **options):
        app.invoke(QUESTION, {"configurable": {"choreo": RunOptions(seed=5)}})
    return app


def outcomes(report: ReplayReport) -> dict[str, str]:
    """Of each call, by author and which of its calls it is."""
    said: Counter[str] = Counter()
    found: dict[str, str] = {}
    for call in report.calls:
        said[call.place[0]] += 1
        found[f"{call.place[0]}:{said[call.place[0]]}"] = call.outcome
    return found


def look(state: Mapping[str, Any]) -> dict[str, Any]:
    executions["look"] += 1
    return {"looks": state.get("looks", 0) + 1, "messages": [AIMessage("Ann has a bag.")]}


def looking(confidential: bool = False) -> ChoreoGraph:
    """Ann speaks, a function looks, and Bob speaks about both."""
    graph = ChoreoGraph(Counted, system="Agents read their notes and answer the question.")
    graph.add_node(Agent("ann", system="Ann has 3 red kites.", confidential=confidential, sampling=FREE))
    graph.add_node("look", look)
    graph.add_node(Agent("bob", sampling=FREE, reads={"ann": "shared"}))
    graph.add_edge(START, "ann", visibility="reencoded")
    graph.add_edge("ann", "look", visibility={}).add_edge("look", "bob")
    return graph


def calling() -> ChoreoGraph:
    """An agent that must call a tool, and one that tells what came of it."""
    graph = ChoreoGraph(system="Be brief.")
    told: dict[str, Any] = {"sampling": Sampling(temperature=1.0, max_tokens=60), "thinking": False}
    graph.add_node(Agent("ann", tools=[count], tool_choice="count", **told))
    graph.add_node("tools", ToolNode([count]))
    graph.add_node(Agent("bob", sampling=FREE, thinking=False, reads={"ann": "shared", "tools": "shared"}))
    graph.add_edge(START, "ann").add_edge("ann", "tools", visibility={}).add_edge("tools", "bob").add_edge("bob", END)
    return graph


def routed(state: Mapping[str, Any]) -> Command[Any]:
    """Goes where Ann's message says."""
    return Command(goto="bob" if "B" in str(state["messages"][-1].text) else "cleo", update={"looks": 1})


def routing() -> ChoreoGraph:
    """What Ann says decides who speaks next."""
    graph = ChoreoGraph(Counted)
    graph.add_node(Agent("ann", system="Ann has 3 red kites.", sampling=FREE))
    graph.add_node("routed", routed, destinations=("bob", "cleo"))
    for name in ("bob", "cleo"):
        graph.add_node(Agent(name, sampling=FREE, reads={"ann": "shared"})).add_edge(name, "last", visibility={})
    graph.add_node(Agent("last", sampling=FREE, reads={"bob": "shared", "cleo": "shared"}))
    graph.add_edge(START, "ann").add_edge("ann", "routed", visibility={})
    return graph


def save_caller(folder: Path) -> Path:
    """A random model whose template knows of tools."""
    tokenizer = tool_tokenizer("Qwen 3")
    save_tiny_llama(
        folder,
        vocab_size=len(tokenizer),
        eos_token_id=[tokenizer.eos_token_id],
        max_position_embeddings=8192,
        num_hidden_layers=1,
    )
    tokenizer.save_pretrained(folder)
    return folder


def reading() -> ChoreoGraph:
    """One who is shared with, one whose words are encoded again, a function, and one who reads them all."""
    graph = ChoreoGraph(system="Answer.")
    graph.add_node(Agent("ann", system="Ann has 3 kites.", sampling=FREE))
    graph.add_node(Agent("bob", sampling=FREE))
    graph.add_node("look", lambda _: {"messages": [AIMessage("Cleo has 9 cups.")]})
    graph.add_node(Agent("judge", sampling=FREE, reads={"ann": "shared", "bob": "reencoded"}))
    graph.add_edge(START, "ann").add_edge(START, "bob").add_edge(["ann", "bob"], "look", visibility={})
    return graph.add_edge("look", "judge").add_edge("judge", END)
