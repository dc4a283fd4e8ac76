"""Which debate the commands hold."""

from __future__ import annotations

from typing import Annotated

import typer

from choreo_agents.lab.language.tasks.debate import DebateProblem, debate_problem
from choreo_agents.lab.language.tasks.record_debate import REPORTS, record_debate_problem

ReportsOption = Annotated[
    int,
    typer.Option(
        "--reports",
        min=0,
        max=REPORTS,
        help="Reports that all agents read, about 98 tokens each; without any, their notes say all there is to know.",
    ),
]


def debate_drawn(seed: int, *, agents: int, reports: int) -> DebateProblem:
    """The problem of a seed: over a record of so many reports, or over notes alone."""
    if not reports:
        return debate_problem(seed, agents=agents)
    return record_debate_problem(seed, agents=agents, reports=reports)
