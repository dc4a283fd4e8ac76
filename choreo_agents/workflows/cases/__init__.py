"""Runnable cases of all workflows, each with options, items and scoring, and the bundled problems.

Commands list their options before torch and LangGraph are imported, so cases import graphs in the bodies of methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import as_file, files

from choreo_agents.workflows.case import Case, Item
from choreo_agents.workflows.cases.branch_solve_merge import MergeCase
from choreo_agents.workflows.cases.debate import DebateCase
from choreo_agents.workflows.cases.direct import DirectCase
from choreo_agents.workflows.cases.iterative_debate import IterativeDebateCase
from choreo_agents.workflows.cases.multi_qa import MultiQACase
from choreo_agents.workflows.cases.prisoners_dilemma import DilemmaCase
from choreo_agents.workflows.cases.tree_of_thoughts import TreeCase

_ALL = (DebateCase(), DirectCase(), IterativeDebateCase(), TreeCase(), MergeCase(), MultiQACase(), DilemmaCase())
CASES: Mapping[str, Case] = {case.name: case for case in _ALL}
"""Cases by the name of the workflow's function."""
SUMS = dict.fromkeys(("direct", "iterative_debate"), "sums")
"""Workflows that share a file of problems, and its name."""


def problem(name: str, number: int) -> Item:
    """Return one of the twenty bundled problems of a workflow: `number` modulo 20."""
    from choreo_agents.workflows.playing import read_items

    with as_file(files("choreo_agents.workflows") / "problems" / f"{SUMS.get(name, name)}.jsonl") as path:
        items = read_items(CASES[name], path)
    return items[number % len(items)]


__all__ = ["CASES", "SUMS", "problem"]
