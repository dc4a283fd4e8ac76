"""Errors go from one process to another as they are."""

from __future__ import annotations

import pickle

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from choreo_agents import errors
from choreo_agents.cli import app
from choreo_agents.cli.words import glossary
from choreo_agents.errors import ChoreoError, GuideError, PMLError, PMLProblem
from choreo_agents.terminal.options import errors_as_lines

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ChoreoError)]
MADE = {
    GuideError: lambda: GuideError("it came to no end", said="half of"),
    PMLError: lambda: PMLError([PMLProblem("b.pml", 2, 1, "no slot", "a slot"), PMLProblem("a.pml", 1, 1, "no end")]),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_they_survive_pickling_with_all_that_they_say(kind: type[ChoreoError]) -> None:
    error = MADE.get(kind, lambda: kind("what happened: what to do"))()
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
    assert kind not in MADE or vars(again), "its fields are there"


def test_the_tree_that_is_drawn_has_them_all() -> None:
    drawn = errors.__doc__ or ""
    # What is a kind of another for readers alone is told with that.
    assert {kind.__name__ for kind in KINDS if kind.__name__ not in drawn} == {"ChatTemplateError"}


def test_the_words_of_messages_are_in_the_glossary_and_notes_lead_there() -> None:
    known = {name for names in glossary() for name in names}
    assert {word for kind in KINDS for word in kind.words} <= known
    error = errors.KVBudgetError("too long")
    assert error.__notes__ == ["`choreo words view tier` says what is meant by view and tier"]
    assert str(error) == "too long" and pickle.loads(pickle.dumps(error)).__notes__ == error.__notes__
    assert not hasattr(errors.ThreadBusyError("busy"), "__notes__")


def test_the_command_says_what_they_mean() -> None:
    told = CliRunner().invoke(app, ["words", "view", "channel"])
    assert told.exit_code == 0 and "what one call attends to" in told.output and "encoding channel" in told.output
    assert "lease" not in told.output and "a claim on a message" in CliRunner().invoke(app, ["words"]).output
    unknown = CliRunner().invoke(app, ["words", "view", "nonsense"])
    assert unknown.exit_code == 1 and "'nonsense' is no word of ours" in unknown.output


def test_a_command_that_fails_leads_there() -> None:
    with pytest.raises(typer.Exit), errors_as_lines(console := Console(record=True)):
        raise errors.ReplayError("another model")
    assert "what is meant by recording: choreo words recording" in console.export_text()
