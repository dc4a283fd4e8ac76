"""What every problem of the language is like, whatever it asks."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest
from choreo_bench.language import TASKS, Draft, Problem, ProblemMessage, Task, draw_problem, siblings, vocabulary
from choreo_bench.language.tasks import (
    Arithmetic,
    BestSupported,
    BranchSolveMerge,
    Check,
    Choose,
    Conflict,
    Debate,
    DebateTurn,
    Diagnosis,
    ListUnion,
    MajorityVote,
    ModeratedDebate,
    MultiDocument,
    PrisonersDilemma,
    Recall,
    SeveralQuestions,
    Summary,
    SumOfParts,
    Trajectories,
    TwoHop,
)
from hypothesis import given
from hypothesis import strategies as st

NAMES = sorted(TASKS)
SPLITS = ("train", "dev", "test")
ON_THEIR_OWN = (
    *("best_supported", "choose_by_index", "choose_by_value", "conflict", "diagnosis"),
    *("list_union", "majority_vote", "sum_of_parts", "trajectories"),
)
WORDS = frozenset(vocabulary.words())
UNKNOWN = "I do not know."
names = st.sampled_from(NAMES)
splits = st.sampled_from(SPLITS)
seeds = st.integers(0, 10**9)
hardnesses = st.none() | st.floats(0.0, 1.0)


def drawn(name: str, split: Any, seed: int, hardness: float | None = None) -> Problem:
    task = TASKS[name]
    return draw_problem(task if hardness is None else task.varied(Random(seed), hardness), split, seed)


def given_texts(problem: Problem) -> list[str]:
    return [message.text for message in problem.messages if not message.is_answer]


def sorted_words(problem: Problem) -> tuple[str, ...]:
    return tuple(sorted(word for text in given_texts(problem) for word in text.split()))


def spelt_out(problem: Problem) -> list[str]:
    """The words of a problem that are no tokens of their own."""
    texts = " ".join(f"{message.author or ''} {message.text}" for message in problem.messages)
    return [word for word in re.sub(r"[.?:,]", "", texts).split() if word not in WORDS]


def parallel(text: str, **more: Any) -> ProblemMessage:
    return ProblemMessage(**{"name": text, "role": "user", "text": text} | more)


@given(names, splits, seeds, hardnesses)
def test_names_are_unique_parents_come_first_and_something_is_said(name, split, seed, hardness) -> None:
    problem = drawn(name, split, seed, hardness)
    order = [message.name for message in problem.messages]
    assert len(set(order)) == len(order)
    for place, message in enumerate(problem.messages):
        assert set(message.parents) <= set(order[:place]) and len(set(message.parents)) == len(message.parents)
        assert message.text.strip() == message.text != ""
        assert message.author if message.role == "assistant" else not message.is_answer
    assert problem.gold_said() and problem.gold and problem.task == name


@given(names, splits, seeds, hardnesses)
def test_the_same_seed_draws_the_same_problem_of_the_split_asked_for(name, split, seed, hardness) -> None:
    problem = drawn(name, split, seed, hardness)
    assert problem == drawn(name, split, seed, hardness)
    assert problem.split == split


@pytest.mark.parametrize("name", NAMES)
def test_different_seeds_mostly_draw_different_problems(name) -> None:
    for split in SPLITS:
        assert len({sorted_words(drawn(name, split, seed)) for seed in range(40)}) > 36


@pytest.mark.parametrize("name", NAMES)
def test_no_words_are_given_in_two_splits_in_whatever_order(name) -> None:
    words = {
        split: {sorted_words(drawn(name, split, seed, hardness)) for seed in range(40) for hardness in (None, 0.0)}
        for split in SPLITS
    }
    assert words["train"] and not (words["train"] & words["dev"] or words["train"] & words["test"])
    assert words["dev"] and not words["dev"] & words["test"]


def test_few_words_in_many_orders_stay_in_one_split() -> None:
    task = SumOfParts(workers=4, largest=4)
    problems = {split: [draw_problem(task, split, seed) for seed in range(150)] for split in SPLITS}
    bags = {split: set(map(sorted_words, drawn)) for split, drawn in problems.items()}
    orders = {split: {tuple(given_texts(problem)) for problem in drawn} for split, drawn in problems.items()}
    assert all(len(orders[split]) > 1.3 * len(bags[split]) for split in SPLITS), "no orders to confuse"
    assert sum(map(len, bags.values())) == len(set.union(*bags.values()))


@given(names, splits, seeds, hardnesses, st.randoms(use_true_random=False))
def test_the_order_of_words_messages_and_speakers_does_not_move_a_problem_to_another_split(
    name, split, seed, hardness, random
) -> None:
    problem = drawn(name, split, seed, hardness)
    messages = [replace(message, parents=(), author="Lucas") for message in problem.messages]
    random.shuffle(messages)
    assert replace(problem, messages=tuple(messages)).split == split
    words = list(sorted_words(problem))
    random.shuffle(words)
    joined = (parallel(" ".join(words)), parallel("anything else", is_answer=True))
    assert replace(problem, messages=joined, task="another").split == split


def test_about_a_tenth_of_problems_is_held_out_for_development_and_another_for_tests() -> None:
    found = [TASKS[name].draw(Random(seed)).split for name in NAMES for seed in range(200)]
    for split in ("dev", "test"):
        assert 0.08 < found.count(split) / len(found) < 0.12


@given(names, splits, seeds, hardnesses)
def test_every_word_is_one_of_the_vocabulary(name, split, seed, hardness) -> None:
    assert not spelt_out(drawn(name, split, seed, hardness))


def test_slips_lead_to_no_word_outside_the_vocabulary() -> None:
    assert not [word for seed in range(300) for word in spelt_out(Choose(slip=0.5).draw(Random(seed)))]


@given(names, splits, seeds, hardnesses, st.randoms(use_true_random=False))
def test_siblings_part_a_view_in_order_into_the_longest_groups_that_have_not_seen_each_other(
    name, split, seed, hardness, random
) -> None:
    problem = drawn(name, split, seed, hardness)
    last = problem.messages[-1].parents
    view = [parent for parent in last if random.random() < 0.8] if random.random() < 0.5 else list(last)
    groups = siblings(problem, view)
    assert [member for group in groups for member in group] == view

    def apart(one: str, other: str) -> bool:
        unseen = one not in has_seen(problem, other) and other not in has_seen(problem, one)
        return unseen and problem.by_name[one].role == problem.by_name[other].role

    assert all(apart(one, other) for group in groups for one, other in combinations(group, 2))
    for group, following in pairwise(groups):
        assert not all(apart(one, following[0]) for one in group)


def has_seen(problem: Problem, name: str) -> set[str]:
    """Everything that a message's author has seen, and what its authors had."""
    parents = problem.by_name[name].parents
    return set(parents).union(*(has_seen(problem, parent) for parent in parents))


def test_reports_that_nobody_has_heard_are_siblings_and_a_conversation_is_not() -> None:
    problem = draw_problem(MultiDocument(fewest=3, most=3), "train", 0)
    reports = ["report 1", "report 2", "report 3"]
    assert siblings(problem, problem.by_name["answer 1"].parents) == [["rules"], reports, ["question 1"]]
    roots = Problem("roots", (parallel("a"), parallel("b", is_answer=True)), "", lambda said: 1.0)
    assert siblings(roots, ["a", "b"]) == [["a", "b"]]
    assert siblings(roots, []) == []


@given(st.sampled_from(ON_THEIR_OWN), splits, seeds, hardnesses)
def test_those_who_speak_on_their_own_are_siblings(name, split, seed, hardness) -> None:
    problem = drawn(name, split, seed, hardness)
    heard = [message for message in problem.messages if message.role == "assistant" and not message.is_answer]
    speakers = [message.name for message in heard if message.parents == heard[-1].parents]
    assert speakers in siblings(problem, problem.messages[-1].parents)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([parallel("a"), parallel("a", is_answer=True)], "are named 'a'"),
        ([parallel("a", is_answer=True, parents=("b",))], r"before its parents \['b'\]"),
        ([parallel("a", is_answer=True, parents=("b",)), parallel("b")], r"before its parents \['b'\]"),
        ([parallel("a", is_answer=True, parents=("a",))], r"before its parents \['a'\]"),
        ([parallel("a"), parallel("b")], "has no message to answer"),
        ([], "has no message to answer"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(messages, why) -> None:
    with pytest.raises(ValueError, match=why):
        Problem("odd", tuple(messages), "", lambda said: 1.0)


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda draft: draft.say("rules", "Go on."), "are named 'rules'"),
        (lambda draft: draft.hear([("Lucas", "Go on."), ("Lucas", "Go on.")]), "are named 'Lucas'"),
        (lambda draft: draft.say("answer", "Go on.", sees=["notes"]), r"before its parents \['notes'\]"),
        (lambda draft: draft.add("question", "user", "Go on."), "has no message to answer"),
    ],
)
def test_a_draft_that_makes_no_sense_is_refused(write: Callable[[Draft], object], why) -> None:
    draft = Draft("Answer.")
    write(draft)
    with pytest.raises(ValueError, match=why):
        draft.done("odd", "", lambda said: 1.0)


@dataclass(frozen=True)
class AlwaysTheSame:
    """A task with one problem."""

    name: str = "always the same"

    def draw(self, rng: Random) -> Problem:
        draft = Draft("Answer.")
        draft.say("answer", "Go on.")
        return draft.done(self.name, "Go on.", lambda said: 1.0)

    def varied(self, rng: Random, hardness: float) -> "AlwaysTheSame":
        return self


def test_a_split_that_a_task_never_draws_is_refused() -> None:
    task = AlwaysTheSame()
    own = task.draw(Random(0)).split
    assert isinstance(task, Task) and draw_problem(task, own, 0).split == own
    for split in set(SPLITS) - {own}:
        with pytest.raises(ValueError, match=f"generated problems of .* is in the '{split}' split"):
            draw_problem(task, split, 0)


def test_tasks_are_known_by_their_names_and_keep_them_when_varied() -> None:
    for name, task in TASKS.items():
        other = task.varied(Random(0), 1.0)
        assert isinstance(task, Task) and type(other) is type(task) and other.name == task.name == name


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"prisoners_dilemma"}))
def test_training_problems_are_longer_the_harder_they_are(name) -> None:
    """Those of the prisoner's dilemma are all alike."""
    words = [sum(len(sorted_words(drawn(name, "train", seed, hard))) for seed in range(60)) for hard in (0.0, 1.0)]
    assert words[0] < words[1]


def count(beginning: str, *, said: bool | None = None) -> Callable[[Problem], int]:
    """How many messages have names that begin so."""
    return lambda problem: sum(m.name.startswith(beginning) and said in (None, m.is_answer) for m in problem.messages)


def told(name: str, form: str) -> Callable[[Problem], int]:
    """How often a message says something."""
    return lambda problem: len(re.findall(form, problem.by_name[name].text if name in problem.by_name else ""))


def voices(problem: Problem) -> list[str]:
    """What others say."""
    return [message.text for message in problem.messages if message.role == "assistant" and not message.is_answer]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


KNOBS: list[tuple[Task, str, Callable[[Problem], object], set[object]]] = [
    (Recall(documents=3), "documents", count("notes"), {3}),
    (Recall(facts=7), "facts", told("notes 2", r"\."), {7}),
    (Recall(questions=5), "questions", count("answer"), {5}),
    (Recall(unknown=1.0), "unknown", lambda problem: problem.gold, {f"{UNKNOWN} {UNKNOWN}"}),
    (Recall(kinds=1), "kinds", lambda p: len(set(re.findall(r"has ([^.]+)", " ".join(given_texts(p))))), {1}),
    (SeveralQuestions(questions=4), "questions", count("question"), {4}),
    (SeveralQuestions(facts=9), "facts", told("notes", r"\."), {9}),
    (SeveralQuestions(elliptic=1.0), "elliptic", told("question 2", "^And "), {1}),
    (SeveralQuestions(kinds=1), "kinds", lambda p: len(set(re.findall(r"has ([^.]+)", " ".join(given_texts(p))))), {1}),
    (BranchSolveMerge(size=3), "size", lambda p: p.by_name["problem"].text.count("with"), {9}),
    (BranchSolveMerge(branches=4), "branches", count("branch", said=True), {4}),
    (MajorityVote(voters=7), "voters", lambda problem: len(voices(problem)), {7}),
    (MajorityVote(answers=1), "answers", lambda problem: len(set(voices(problem))), {1}),
    (BestSupported(candidates=6), "candidates", lambda problem: len(voices(problem)), {6}),
    (BestSupported(largest=5), "largest", lambda problem: max(numbers(text)[0] for text in voices(problem)), {5}),
    (ListUnion(workers=5), "workers", lambda problem: len(voices(problem)), {5}),
    (ListUnion(items=5), "items", lambda p: {len(re.split(", | and ", text)) for text in voices(p)} == {5}, {True}),
    (ListUnion(kinds=3), "kinds", lambda problem: len(problem.gold.split(", ")), {3}),
    (SumOfParts(workers=5), "workers", lambda problem: len(voices(problem)), {5}),
    (SumOfParts(largest=2), "largest", lambda problem: sum(numbers(problem.gold)), {6}),
    (TwoHop(people=8), "people", told("notes 1", r"\."), {8}),
    (TwoHop(questions=3), "questions", count("answer"), {3}),
    (Conflict(reports=5), "reports", lambda problem: len(voices(problem)), {5}),
    (Conflict(largest=4), "largest", lambda problem: max(numbers(problem.by_name["trust"].text)), {4}),
    (Diagnosis(gauges=6), "gauges", lambda problem: len(voices(problem)), {6}),
    (Diagnosis(rules=7), "rules", told("handbook", r"\."), {7}),
    (MultiDocument(most=4), "most", count("report"), {4}),
    (MultiDocument(fewest=16), "fewest", count("report"), {16}),
    (MultiDocument(facts=11), "facts", told("report 4", r"\."), {11}),
    (MultiDocument(questions=3), "questions", count("answer"), {3}),
    (MultiDocument(unknown=1.0), "unknown", lambda problem: problem.gold, {UNKNOWN}),
    (Trajectories(branches=2), "branches", lambda problem: len(voices(problem)), {2}),
    (Trajectories(calls=10), "calls", lambda problem: {text.count(".") for text in voices(problem)} == {10}, {True}),
    (Trajectories(lost=0.0), "lost", lambda p: sum(text.count("none") for text in voices(p)), {0}),
    (Trajectories(questions=3), "questions", count("answer"), {3}),
    (
        Trajectories(short=True),
        "short",
        lambda p: any(t.count("none") and t.count(".") > 1 for t in voices(p)),
        {False},
    ),
    (Summary(calls=10), "calls", lambda problem: voices(problem)[0].count("."), {10}),
    (Summary(lost=1.0), "lost", lambda problem: problem.gold.count("."), {1}),
    (Arithmetic(steps=6), "steps", told("answer", "plus|minus"), {6}),
    (Arithmetic(slip=1.0, steps=3), "slip", lambda problem: problem.score(problem.gold_said()), {0.0}),
    (Check(steps=6), "steps", lambda problem: len(re.findall("plus|minus", voices(problem)[0])), {6}),
    (Check(wrong=1.0), "wrong", lambda problem: problem.gold.split()[-1], {"wrong."}),
    (Check(wrong=0.0), "wrong", lambda problem: problem.gold.split()[-1], {"right."}),
    (Choose(candidates=6), "candidates", lambda problem: len(voices(problem)), {6}),
    (Choose(steps=6), "steps", lambda problem: len(re.findall("plus|minus", voices(problem)[0])), {6}),
    (Choose(slip=0.0), "slip", lambda problem: len(set(voices(problem))), {1}),
    (
        Choose(by="index"),
        "by",
        lambda problem: re.fullmatch(r"I vote for [A-Z]\w+\.", problem.gold) is not None,
        {True},
    ),
    (ModeratedDebate(steps=6), "steps", told("affirmative 1", "plus|minus"), {6}),
    (ModeratedDebate(slip=1.0), "slip", told("moderator 1", "Go on"), {1}),
    (ModeratedDebate(rounds=2), "rounds", count("moderator"), {2}),
    (Debate(agents=5), "agents", count("notes"), {5}),
    (Debate(rounds=4), "rounds", count("Alice"), {4}),
    (Debate(facts=7), "facts", told("notes Alice", r"\."), {7}),
    (DebateTurn(facts=7), "facts", told("notes", r"\."), {0, 6, 7}),
    (
        DebateTurn(others=4),
        "others",
        lambda p: len({m.author for m in p.messages} - {None, p.messages[-1].author}),
        {4},
    ),
    (DebateTurn(rounds=5), "rounds", lambda p: sum(m.author == p.messages[-1].author for m in p.messages), {1, 5}),
    (PrisonersDilemma(talks=3), "talks", lambda problem: len(problem.gold_said()), {10}),
    (PrisonersDilemma(strategies=("free",)), "strategies", lambda p: given_texts(p).count("Do what you like."), {2}),
]
"""Tasks with one field set, how it shows in a problem, and what is to be seen there over many seeds."""


@pytest.mark.parametrize(("task", "knob", "measure", "wanted"), KNOBS, ids=[f"{k[0].name} {k[1]}" for k in KNOBS])
def test_every_knob_does_what_it_says(task, knob, measure, wanted) -> None:
    default = replace(task, **{field.name: field.default for field in fields(task) if field.name == knob})
    assert {measure(task.draw(Random(seed))) for seed in range(60)} == wanted
    assert {measure(default.draw(Random(seed))) for seed in range(60)} != wanted


def test_every_field_of_every_task_is_among_the_knobs() -> None:
    turned = {(type(task), knob) for task, knob, _, _ in KNOBS}
    assert turned == {(type(task), field.name) for task in TASKS.values() for field in fields(task)} - {
        (type(task), "name") for task in TASKS.values()
    }
