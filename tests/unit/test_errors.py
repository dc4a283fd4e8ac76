"""Errors go from one process to another as they are."""

from __future__ import annotations

import pickle

import pytest

from choreo_agents import errors
from choreo_agents.errors import ChoreoError, ConstraintError, PMLError, PMLProblem

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ChoreoError)]
MADE = {
    ConstraintError: lambda: ConstraintError("it came to no end", text="half of"),
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
