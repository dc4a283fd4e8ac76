"""Several questions that are encoded apart and answered in one reply (Prompt Choreography, section 3.3 and figure 4).

On an engine that re-encodes text, a question attends to those before it. Read from the cache it does not: the questions
appear one after the other (`serial`), or all at one offset (`parallel`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from langchain_core.messages import HumanMessage

from choreo_agents.graph import END, START, Agent, ChoreoGraph, VisibilityRule
from choreo_agents.graph.prompts import Prompt
from choreo_agents.sampling import Sampling

Layout = Literal["serial", "parallel"]
ANSWERER = "answerer"


def multi_qa(
    questions: Sequence[str],
    *,
    layout: Layout = "serial",
    system: str | None = None,
    notes: str | None = None,
    prompt: Prompt | None = None,
    speaker: str = "Answerer",
    sampling: Sampling | None = None,
) -> ChoreoGraph:
    """Return a graph with a node for each question, none of which sees another, and one answerer.

    Args:
        questions: The questions.
        layout: Positions of the questions in the answerer's view.
        system: Shared system prompt.
        notes: The answerer's private system prompt; each question is encoded behind it.
        prompt: Prompt after the questions.
        speaker: Name of the answerer.
        sampling: Sampling of the answerer.

    Raises:
        ValueError: There is no question, or no such layout.
    """
    if not questions:
        raise ValueError("there is no question to answer: pass at least one")
    if layout not in ("serial", "parallel"):
        raise ValueError(f"layout must be 'serial' or 'parallel', not {layout!r}")
    graph = ChoreoGraph(system=system)
    rule = VisibilityRule() if notes is None else VisibilityRule("reencoded", scope=(f"{ANSWERER}.system",))
    names = [f"question {number}" for number in range(1, len(questions) + 1)]
    placed: Literal["sequential", "parallel"] = "sequential" if layout == "serial" else "parallel"
    graph.add_node(ANSWERER, Agent(speaker, system=notes, prompt=prompt, sampling=sampling, positions=placed))
    for name, question in zip(names, questions, strict=True):
        graph.add_node(name, partial(_ask, question))
        graph.add_edge(START, name)
    graph.add_edge(names, ANSWERER, visibility=rule)
    graph.add_edge(ANSWERER, END)
    return graph


def _ask(question: str, _: Any) -> dict[str, Any]:
    return {"messages": [HumanMessage(question)]}
