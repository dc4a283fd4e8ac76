"""Every workflow as something to do, with what its result is worth."""

from collections.abc import Mapping

from choreo_agents.lab.cases.branch_solve_merge import MergeCase
from choreo_agents.lab.cases.debate import DebateCase
from choreo_agents.lab.cases.direct import DirectCase
from choreo_agents.lab.cases.iterative_debate import IterativeDebateCase
from choreo_agents.lab.cases.multi_qa import MultiQACase
from choreo_agents.lab.cases.prisoners_dilemma import DilemmaCase
from choreo_agents.lab.cases.tree_of_thoughts import TreeCase
from choreo_agents.workflows.case import Case

_ALL: tuple[Case, ...] = (
    DebateCase(),
    DirectCase(),
    IterativeDebateCase(),
    TreeCase(),
    MergeCase(),
    MultiQACase(),
    DilemmaCase(),
)
CASES: Mapping[str, Case] = {case.name: case for case in _ALL}
"""By the name of the workflow's function."""

__all__ = ["CASES"]
