"""Bundled debates that are ready to be run."""

from __future__ import annotations

from choreo_agents.models import LoadedModel
from choreo_agents.workflows.cases import CASES, DebateOptions, debate_problem
from choreo_agents.workflows.playing import Setting, make_setup


def debate_setting(model: LoadedModel, number: int, rounds: int = 2) -> Setting:
    """A debate of three agents, with greedy answers of at most 32 tokens."""
    setup = make_setup(CASES["debate"], DebateOptions(rounds=rounds), model, None, 0.0, 1.0, max_tokens=32)
    return Setting(model, setup, debate_problem(number), number)
