"""What every synthesis problem is like, whatever is merged and by however many."""

import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from choreo_bench.embedded.tokenizer import build_tokenizer
from choreo_bench.language import Problem, draw_problem, draw_problems, vocabulary
from choreo_bench.language.scoring import sentences
from choreo_bench.language.synthesis import FROM_TRUNK, SYNTHESIS_TASKS, Parts, Synthesis
from hypothesis import given
from hypothesis import strategies as st

NAMES = sorted(SYNTHESIS_TASKS)
SPLITS = ("train", "dev", "test")
WORDS = frozenset(vocabulary.words())
TOKENIZER = build_tokenizer()
names, splits, seeds = st.sampled_from(NAMES), st.sampled_from(SPLITS), st.integers(0, 10**9)
hardnesses = st.none() | st.floats(0.0, 1.0)


def task(name: str, **knobs: Any) -> Synthesis:
    return replace(SYNTHESIS_TASKS[name], **knobs)  # type: ignore[type-var]


def drawn(name: str, split: Any, seed: int, hardness: float | None = None, **knobs: Any) -> Problem:
    own = task(name, **knobs)
    return draw_problem(own if hardness is None else own.varied(Random(seed), hardness), split, seed)


def content_words(text: str) -> set[str]:
    """Numbers and names: what has to be known, and cannot be guessed from the question."""
    return set(re.findall(r"\d+|[A-Z]\w+", text)) & {*vocabulary.NUMBERS, *vocabulary.PEOPLE}


@given(names, splits, seeds, hardnesses)
def test_a_drawn_problem_is_a_synthesis_of_its_split_with_a_gold_answer(name, split, seed, hardness) -> None:
    problem = drawn(name, split, seed, hardness)
    assert problem == drawn(name, split, seed, hardness)
    assert problem.split == split and problem.task == name
    parts = Parts.of(problem)
    assert len(parts.branches) == len(problem.branches) >= 2
    assert problem.score(problem.gold_said()) == 1.0


@given(names, seeds, hardnesses, st.randoms(use_true_random=False))
def test_a_wrong_answer_does_not_score_in_full(name, seed, hardness, random) -> None:
    problem = drawn(name, "test", seed, hardness)
    answer = Parts.of(problem).answer
    said = sentences(answer.text)
    assert problem.score({answer.name: " ".join(said[:-1])}) < 1
    assert problem.score({answer.name: "I do not know."}) < 1
    other = Parts.of(drawn(name, "test", seed + 1, hardness))
    if sentences(other.answer.text)[-1] != said[-1] and other.answer.text != answer.text:
        assert problem.score({answer.name: other.answer.text}) < 1


@given(names, seeds, hardnesses)
def test_private_notes_are_seen_by_one_worker_and_by_nobody_else(name, seed, hardness) -> None:
    problem = drawn(name, "train", seed, hardness)
    parts = Parts.of(problem)
    for branch in parts.branches:
        for message in branch.private:
            own = {branch.words.name, *(m.name for m in branch.private)}
            readers = {other.name for other in problem.messages if message.name in other.parents}
            assert branch.words.name in readers <= own
    private = {message.name for branch in parts.branches for message in branch.private}
    assert not private & {*parts.answer.parents, *(parent for ask in parts.asks for parent in ask.parents)}


@given(names, seeds, hardnesses)
def test_the_answer_follows_from_what_the_synthesizer_sees(name, seed, hardness) -> None:
    """Whatever is to be said is in its view; sums and what is worked out in between aside."""
    problem = drawn(name, "test", seed, hardness)
    parts = Parts.of(problem)
    view = " ".join(problem.by_name[parent].text for parent in parts.answer.parents)
    if name in ("sum", "candidates"):
        return
    assert content_words(parts.answer.text) <= content_words(view)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {*FROM_TRUNK, "monitors"}))
def test_the_answer_does_not_follow_from_the_trunk(name) -> None:
    """Of monitors, the trunk has the words of the answer, but not which of the rules it is."""
    for seed in range(30):
        parts = Parts.of(drawn(name, "test", seed))
        known = set(re.findall(r"\w+", " ".join(message.text for message in (*parts.trunk, *parts.asks))))
        assert set(re.findall(r"\w+", parts.answer.text)) - known - {"We", "see", "I", "Support"}


@given(names, seeds)
def test_a_worker_with_notes_finds_its_words_there(name, seed) -> None:
    for branch in Parts.of(drawn(name, "test", seed, private=5)).branches:
        notes = [message.text for message in branch.private if message.name.startswith("notes")]
        if notes:
            assert content_words(
                branch.words.text.partition(": ")[2] if name in ("hops", "reports") else branch.words.text
            ) <= content_words(notes[0])


@pytest.mark.parametrize("name", NAMES)
def test_notes_are_of_every_length_from_none_to_the_longest(name) -> None:
    lengths: dict[int, set[int]] = {}
    for seed in range(60):
        for branch in Parts.of(drawn(name, "train", seed, private=5)).branches:
            notes = [message for message in branch.private if message.role == "system"]
            told = len(sentences(branch.words.text))
            lengths.setdefault(told, set()).add(len(sentences(notes[0].text)) - told + 1 if notes else 0)
    assert set.union(*lengths.values()) == {0, 1, 2, 3, 4, 5}
    alone = [Parts.of(drawn(name, "train", seed, private=0)) for seed in range(20)]
    turns = {m.role for parts in alone for branch in parts.branches for m in branch.private}
    assert turns == ({"user"} if name == "assembly" else set())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("branches", [2, 3, 4, 8, 12, 16])
def test_any_number_of_branches_up_to_the_most(name, branches) -> None:
    own = SYNTHESIS_TASKS[name]
    if branches > own.most_branches:
        with pytest.raises(ValueError, match="branches, not"):
            own.with_branches(branches)
        return
    for seed in range(5):
        problem = draw_problem(own.with_branches(branches), "test", seed)
        assert len(Parts.of(problem).branches) == branches
        assert len(TOKENIZER.encode(Parts.of(problem).answer.text)) < 96, "no answer of that length is decoded"
        assert problem.score(problem.gold_said()) == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_longer_branches_where_a_task_has_them(name) -> None:
    own = task(name)
    if own.lengths == (1, 1):
        return
    least, most = own.lengths
    words = [
        sum(
            len(b.words.text)
            for seed in range(10)
            for b in Parts.of(drawn(name, "test", seed, branches=3, length=n)).branches
        )
        for n in (least, most)
    ]
    assert words[0] < words[1]


@pytest.mark.parametrize("name", NAMES)
def test_no_words_that_the_answer_sees_are_in_two_splits(name) -> None:
    seen: dict[str, set[tuple[str, ...]]] = {split: set() for split in SPLITS}
    for split in SPLITS:
        for seed in range(60):
            for hardness in (None, 0.0):
                problem = drawn(name, split, seed, hardness)
                view = " ".join(problem.by_name[parent].text for parent in Parts.of(problem).answer.parents)
                seen[split].add(tuple(sorted(view.split())))
    assert not (seen["train"] & seen["test"] or seen["train"] & seen["dev"] or seen["dev"] & seen["test"])


@given(names, splits, seeds, hardnesses)
def test_every_word_is_one_of_the_vocabulary(name, split, seed, hardness) -> None:
    messages = drawn(name, split, seed, hardness).messages
    texts = " ".join(f"{message.author or ''} {message.text}" for message in messages)
    assert set(re.sub(r"[.?:,]", "", texts).split()) <= WORDS


@given(names, splits, seeds, hardnesses, st.integers(1, 9))
def test_several_questions_differ_in_question_and_answer_alone(name, split, seed, hardness, questions) -> None:
    own = task(name) if hardness is None else task(name).varied(Random(seed), hardness)
    first, *others = draw_problems(own, split, seed, questions)
    assert len(others) < questions and (others == [] or name in ("hops", "reports"))
    assert len({problem.messages[-2:] for problem in (first, *others)}) == 1 + len(others)
    for problem in (first, *others):
        assert problem.messages[:-2] == first.messages[:-2] and problem.split == split
        assert replace(Parts.of(problem), asks=(), answer=first.messages[-1]) == replace(Parts.of(first), asks=())
        assert problem.score(problem.gold_said()) == 1.0
        assert all(problem.score(other.gold_said()) < 1 for other in (first, *others) if other is not problem)


@given(names, splits, seeds)
def test_one_question_is_the_problem_itself(name, split, seed) -> None:
    assert draw_problems(task(name), split, seed) == [draw_problem(task(name), split, seed)]


@pytest.mark.parametrize("name", ["hops", "reports"])
def test_as_many_questions_as_there_are_facts_to_ask_for(name) -> None:
    """4 workers: two know 3 friends each, the others what 6 of these have. 8 workers report 8 facts each."""
    most = {"hops": 6, "reports": 64}[name]
    asked = [draw_problems(task(name), "train", seed, 100) for seed in range(20)]
    # Some belong to other splits.
    assert most / 2 < max(len(problems) for problems in asked) <= most
    assert {len(task(name).draw_several(Random(seed), 100)) for seed in range(20)} == {most}
