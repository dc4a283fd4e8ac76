"""The bundled debate problems: agents share a record and have private notes, some of which are wrong on purpose."""

from __future__ import annotations

from typing import Any

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.workflows.cases import CASES, problem
from choreo_agents.workflows.cases.debate import REPORTS, DebateItem, DebateOptions
from choreo_agents.workflows.playing import Setting, make_setup

LEAST_AGENTS = 3
"""One agent with the right answer in its notes, one with a wrong answer, and one that needs the record."""


def problem_of(number: int, *, agents: int = LEAST_AGENTS, reports: int = REPORTS) -> DebateItem:
    """Return a bundled debate: one agent's notes have the answer, one's have it wrong, the others' say nothing of it.

    Args:
        number: Which of the twenty problems, modulo 20.
        agents: 3 to 8.
        reports: Reports of the record that are kept, always with the one that has the answer; 0: no record.

    Raises:
        InvalidRequestError: There are fewer than 3 agents.
    """
    if agents < LEAST_AGENTS:
        raise InvalidRequestError(f"the built-in debates need at least {LEAST_AGENTS} agents, not {agents}")
    item = problem("debate", number)
    assert isinstance(item, DebateItem) and item.answer is not None
    key_report = next(place for place, report in enumerate(item.record) if item.answer in report)
    other_reports = [place for place in range(len(item.record)) if place != key_report]
    record = tuple(item.record[place] for place in sorted([key_report, *other_reports][:reports]))
    return item.model_copy(update={"notes": item.notes[:agents], "record": record})


def setting_of(
    model: LoadedModel, number: int, *, agents: int = LEAST_AGENTS, rounds: int = 2, reports: int = REPORTS, **more: Any
) -> Setting:
    """Return a bundled debate that is ready to run, with greedy answers of at most 32 tokens.

    Args:
        model: Serves the debate.
        number: Which of the twenty problems; also the seed.
        agents: 3 to 8.
        rounds: How often each agent speaks.
        reports: As for `problem_of`.
        more: Further fields of `Setting`.
    """
    options = DebateOptions(agents=agents, rounds=rounds)
    setup = make_setup(CASES["debate"], options, model, None, 0.0, 1.0, max_tokens=32)
    return Setting(model, setup, problem_of(number, agents=agents, reports=reports), number, **more)
