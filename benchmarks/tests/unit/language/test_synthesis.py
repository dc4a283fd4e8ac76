"""Synthesis problems by example: what belongs to whom, and which are refused."""

from dataclasses import replace
from random import Random

import pytest
from choreo_bench.language import TASKS, Draft, Problem, ProblemMessage, draw_problem, vocabulary
from choreo_bench.language.synthesis import HELD_OUT, SYNTHESIS_TASKS, Parts, Synthesis, SynthesisTask
from choreo_bench.language.tasks import MajorityVote
from choreo_bench.language.tasks.base import draw_agents

A, B = "Ann has 3 red kites.", "Ann has 5 red kites."


def merge(**changes: dict[str, object]) -> Problem:
    """Two workers, the first of whom has notes and a turn of its own."""
    messages = [
        ProblemMessage("rules", "system", "Answer."),
        ProblemMessage("problem", "user", "What does Ann have?", parents=("rules",)),
        ProblemMessage("notes 1", "system", f"Notes: {A}", parents=("rules", "problem")),
        ProblemMessage("turn 1", "user", "Go on.", parents=("rules", "problem", "notes 1")),
        ProblemMessage("one", "assistant", A, "Alice", ("rules", "problem", "notes 1", "turn 1")),
        ProblemMessage("two", "assistant", B, "Bruno", ("rules", "problem")),
        ProblemMessage("ask", "user", "What do most say?", parents=("rules", "problem", "one", "two")),
        ProblemMessage("answer", "assistant", A, "Clara", ("rules", "problem", "one", "two", "ask"), is_answer=True),
    ]
    changed = tuple(replace(m, **changes.get(m.name, {})) for m in messages)  # type: ignore[arg-type]
    return Problem("merge", changed, A, lambda said: float(said["answer"] == A), branches=("one", "two"))


def test_a_problem_falls_into_trunk_branches_asks_and_answer() -> None:
    parts = Parts.of(merge())
    assert [message.name for message in parts.trunk] == ["rules", "problem"]
    assert [[message.name for message in branch.private] for branch in parts.branches] == [["notes 1", "turn 1"], []]
    assert [branch.words.name for branch in parts.branches] == ["one", "two"]
    assert [message.name for message in parts.asks] == ["ask"] and parts.answer.name == "answer"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"one": {"is_answer": True}}, "2 branches and 2 messages to answer"),
        ({"answer": {"parents": ("rules", "problem", "one", "ask")}}, "does not see every branch"),
        ({"answer": {"parents": ("rules", "problem", "two", "one", "ask")}}, "one after the other"),
        ({"answer": {"parents": ("rules", "problem", "one", "ask", "two")}}, "one after the other"),
        ({"answer": {"parents": ("rules", "problem", "notes 1", "one", "two", "ask")}}, "does not see the trunk"),
        ({"answer": {"parents": ("problem", "one", "two", "ask")}}, "does not see the trunk"),
        ({"two": {"parents": ("rules", "problem", "one")}}, "or sees another branch"),
        ({"ask": {"parents": ("rules", "problem", "one")}}, "'ask' sees"),
        ({"turn 1": {"parents": ("rules", "problem")}}, "'turn 1' sees"),
        ({"problem": {"parents": ()}}, "'problem' sees"),
    ],
)
def test_what_is_no_synthesis_is_refused(changes: dict[str, dict[str, object]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Parts.of(merge(**changes))


def test_an_ordinary_problem_is_no_synthesis_and_a_branch_must_exist() -> None:
    with pytest.raises(ValueError, match="it has 0 branches"):
        Parts.of(draw_problem(TASKS["majority_vote"], "test", 0))
    draft = Draft("Answer.")
    draft.say("answer", A, "Alice")
    with pytest.raises(ValueError, match="the branch 'one' of 'odd' is not a message"):
        replace(draft.done("odd", A, lambda said: 1.0), branches=("one",))


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("vote", {"branches": 1}),
        ("vote", {"branches": 17}),
        ("monitors", {"branches": 8}),
        ("vote", {"length": 2}),
        ("union", {"length": 0}),
        ("vote", {"private": -1}),
    ],
)
def test_knobs_that_cannot_be_turned_so_far_are_refused(name: str, knobs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{name!r} has|notes cannot have"):
        replace(SYNTHESIS_TASKS[name], **knobs)  # type: ignore[type-var]


def test_synthesis_tasks_have_names_of_their_own_and_one_is_held_out() -> None:
    assert len(SYNTHESIS_TASKS) >= 9 and not set(SYNTHESIS_TASKS) & set(TASKS)
    assert HELD_OUT in SYNTHESIS_TASKS
    assert all(isinstance(task, SynthesisTask) and name == task.name for name, task in SYNTHESIS_TASKS.items())


def test_notes_do_not_decide_the_split_and_the_problem_stays_where_the_task_it_is_made_of_has_it() -> None:
    plain = Synthesis("plain", lambda branches, _: MajorityVote(voters=branches), private=0)
    noted = replace(plain, private=5)
    for seed in range(60):
        alone, told = plain.draw(Random(seed)), noted.draw(Random(seed))
        base = MajorityVote(voters=4).draw(Random(seed))
        assert alone.split == told.split == base.split
        assert Parts.of(alone).answer == Parts.of(told).answer


def test_there_are_names_for_more_speakers_than_there_are_agents() -> None:
    for count in (1, 11, 12, 13, 18):
        assert len(set(draw_agents(Random(count), count))) == count
    assert draw_agents(Random(0), 5) == Random(0).sample(vocabulary.AGENTS, 5), "trained weights know these draws"
