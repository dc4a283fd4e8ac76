"""Debates that are shipped: over a record that all read, with notes some of which are wrong on purpose."""

from __future__ import annotations

from typing import Any

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.workflows.cases import CASES, problem
from choreo_agents.workflows.cases.debate import REPORTS, DebateItem, DebateOptions
from choreo_agents.workflows.playing import Setting, make_setup

LEAST_AGENTS = 3
"""So many have notes of what is asked, or need the record."""


def problem_of(number: int, *, agents: int = LEAST_AGENTS, reports: int = REPORTS) -> DebateItem:
    """A debate that is shipped: one agent has noted the answer, one has it wrong, others noted nothing of it.

    Args:
        number: Which of the twenty.
        agents: 3 to 8.
        reports: Of its record, that with the answer among them; 0: over notes alone.

    Raises:
        InvalidRequestError: There are fewer agents.
    """
    if agents < LEAST_AGENTS:
        raise InvalidRequestError(f"our debates are among {LEAST_AGENTS} agents or more, not {agents}")
    item = problem("debate", number)
    assert isinstance(item, DebateItem) and item.answer is not None
    telling = next(place for place, report in enumerate(item.record) if item.answer in report)
    others = [place for place in range(len(item.record)) if place != telling]
    record = tuple(item.record[place] for place in sorted([telling, *others][:reports]))
    return item.model_copy(update={"notes": item.notes[:agents], "record": record})


def setting_of(
    model: LoadedModel, number: int, *, agents: int = LEAST_AGENTS, rounds: int = 2, reports: int = REPORTS, **more: Any
) -> Setting:
    """One that is shipped, with short answers, each the likeliest; `more` is what a setting takes besides."""
    options = DebateOptions(agents=agents, rounds=rounds)
    setup = make_setup(CASES["debate"], options, model, None, 0.0, 1.0, max_tokens=32)
    return Setting(model, setup, problem_of(number, agents=agents, reports=reports), number, **more)
