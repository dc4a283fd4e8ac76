"""Golds and scorers against the slow solver, which sees neither."""

import re
from dataclasses import replace
from random import Random

import pytest
from bench_support.solver import checked, last, solve
from choreo_bench.language import TASKS, Problem, Task, draw_problem
from choreo_bench.language.tasks import ModeratedDebate
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = sorted(TASKS)
CARELESS = ("arithmetic", "moderated_debate")
"""Tasks whose training text is wrong now and then, so that there is something to check and to vote about."""
splits = st.sampled_from(["train", "dev", "test"])
seeds = st.integers(0, 10**9)
hardnesses = st.floats(0.0, 1.0)
verdicts = st.lists(st.sampled_from(["gold", "Go on.", "The result is 90."]), min_size=3, max_size=3)


def blinded(problem: Problem) -> Problem:
    """The problem without anything that the solver must not read."""
    messages = tuple(replace(message, text="") if message.is_answer else message for message in problem.messages)
    return Problem(problem.task, messages, "", lambda said: pytest.fail("the solver reads the scorer"))


def varied(name: str, seed: int, hardness: float) -> Task:
    return TASKS[name].varied(Random(seed), hardness)


def edited(problem: Problem, random: Random) -> dict[str, str]:
    """What would be right after some small changes: words exchanged, sentences lost, moved or added, spaces."""
    said = problem.gold_said()
    texts = [message.text for message in problem.messages]
    heard = [f"{part}." for text in texts for part in text.rstrip(".").split(". ")] + ["I do not know.", "Go on."]
    for _ in range(random.randint(1, 2 * len(said))):
        name = random.choice(list(said))
        text = said[name].strip()
        words, parts = text.split(), text.removesuffix(".").split(". ")
        kind = random.choice(["exchange", "exchange", "number", "lose", "shuffle", "add", "other", "space", "stop"])
        if kind == "exchange" and words:
            at, word = random.randrange(len(words)), random.choice(random.choice(texts).split()).strip(".,?:")
            stop = words[at][len(words[at].rstrip(".,:")) :]
            said[name] = " ".join([*words[:at], word + stop, *words[at + 1 :]])
        elif kind == "number":
            said[name] = re.sub(r"\d+", lambda number: str(int(number[0]) + 1), text)
        elif kind == "lose":
            said[name] = " ".join(f"{part}." for part in random.sample(parts, len(parts) - 1))
        elif kind == "shuffle":
            said[name] = " ".join(f"{part}." for part in random.sample(parts, len(parts)))
        elif kind == "add":
            said[name] = " ".join(random.sample([text, random.choice(heard)], 2))
        elif kind == "other":
            said[name] = random.choice(heard)
        elif kind == "space":
            said[name] = f" {text}\n"
        elif kind == "stop":
            said[name] = text.removesuffix(".")
    return said


@pytest.mark.parametrize("name", NAMES)
@given(split=splits, seed=seeds, hardness=st.none() | hardnesses)
def test_the_gold_is_what_the_given_words_say(name, split, seed, hardness) -> None:
    problem = draw_problem(TASKS[name] if hardness is None else varied(name, seed, hardness), split, seed)
    assert solve(blinded(problem)).agrees(problem.gold, problem.gold_said())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(split=splits, seed=seeds)
def test_what_a_faultless_model_could_say_is_right_in_every_step_and_scores_one(name, split, seed) -> None:
    problem = draw_problem(TASKS[name], split, seed)
    said = problem.gold_said()
    assert solve(blinded(problem)).faultless(said) and solve(blinded(problem)).right(said)
    assert problem.score(said) == 1


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CARELESS])
@settings(max_examples=20)
@given(split=splits, seed=seeds, hardness=hardnesses)
def test_training_text_is_faultless_where_no_slips_are_taught(name, split, seed, hardness) -> None:
    problem = draw_problem(varied(name, seed, hardness), split, seed)
    assert solve(blinded(problem)).faultless(problem.gold_said())
    assert problem.score(problem.gold_said()) == 1


@given(split=splits, seed=seeds, hardness=hardnesses)
def test_careless_text_is_checked_and_ended_as_its_checker_and_moderator_should(split, seed, hardness) -> None:
    """A round that is checked and found wrong leads to another; what the moderator names is what was worked out."""
    problem = draw_problem(varied("moderated_debate", seed, hardness), split, seed)
    said, question = problem.gold_said(), problem.by_name["problem"].text
    rounds = range(1, 1 + len(said) // 3)
    for number in rounds:
        checked_right = said[f"negative {number}"].endswith("The result is right.")
        assert said[f"negative {number}"] == checked(question, said[f"affirmative {number}"])
        assert said[f"moderator {number}"] == (last(said[f"affirmative {number}"]) if checked_right else "Go on.")
        assert not checked_right or number == rounds[-1]
    assert len(rounds) == 3 or said[f"moderator {rounds[-1]}"] == problem.gold


@pytest.mark.parametrize("name", NAMES)
@given(split=splits, seed=seeds, hardness=st.none() | hardnesses)
def test_exactly_what_the_solver_calls_right_scores_one(name, split, seed, hardness) -> None:
    problem = draw_problem(TASKS[name] if hardness is None else varied(name, seed, hardness), split, seed)
    said = edited(problem, Random(seed))
    score = problem.score(said)
    assert 0 <= score <= 1
    assert (score == 1) == solve(blinded(problem)).right(said), said


@pytest.mark.parametrize("name", NAMES)
def test_edits_leave_some_answers_right_and_make_others_wrong(name) -> None:
    """So that what is compared above is not all of one kind."""
    problems = [draw_problem(TASKS[name], "train", seed) for seed in range(200)]
    right = sum(solve(problem).right(edited(problem, Random(seed))) for seed, problem in enumerate(problems))
    assert 5 <= right <= 150


@pytest.mark.parametrize("name", ["two_questions", "three_questions"])
@given(split=splits, seed=seeds, hardness=hardnesses, random=st.randoms(use_true_random=False))
def test_several_questions_may_be_answered_in_any_order(name, split, seed, hardness, random) -> None:
    problem = draw_problem(varied(name, seed, hardness), split, seed)
    answers = problem.gold.removesuffix(".").split(". ")
    said = {"answer": ". ".join(random.sample(answers, len(answers))) + "."}
    assert problem.score(said) == 1 and solve(blinded(problem)).right(said)
    missing = {"answer": ". ".join(answers[1:]) + "." if answers[1:] else ""}
    assert problem.score(missing) == pytest.approx(1 - 1 / len(answers)) and not solve(blinded(problem)).right(missing)


@given(split=splits, seed=seeds, hardness=hardnesses, random=st.randoms(use_true_random=False))
def test_a_union_may_be_listed_in_any_order(split, seed, hardness, random) -> None:
    problem = draw_problem(varied("list_union", seed, hardness), split, seed)
    things = problem.gold.removeprefix("We see ").removesuffix(".").replace(" and ", ", ").split(", ")
    shuffled = random.sample(things, len(things))
    said = {"answer": f"We see {', '.join(shuffled[:-1])}{' and ' if things[1:] else ''}{shuffled[-1]}."}
    assert problem.score(said) == 1 and solve(blinded(problem)).right(said)
    twice = {"answer": f"We see {', '.join([*shuffled, shuffled[0]])}."}
    assert problem.score(twice) < 1 and not solve(blinded(problem)).right(twice)


@given(split=splits, seed=seeds, hardness=hardnesses)
def test_a_vote_by_index_is_right_for_everybody_with_the_right_result_and_for_nobody_else(
    split, seed, hardness
) -> None:
    problem = draw_problem(varied("choose_by_index", seed, hardness), split, seed)
    solution = solve(blinded(problem))
    scores = {}
    for message in problem.messages:
        vote = {"answer": f"I vote for {message.author}."}
        scores[message.name] = problem.score(vote)
        assert (scores[message.name] == 1) == solution.right(vote)
    assert scores["answer"] == 0, "a vote for oneself"


@given(split=splits, seed=seeds, verdicts=verdicts)
def test_the_first_result_that_a_moderator_names_counts(split, seed, verdicts) -> None:
    problem = draw_problem(ModeratedDebate(slip=1.0, steps=3), split, seed)
    words = [problem.gold if verdict == "gold" else verdict for verdict in verdicts]
    said = problem.gold_said() | {f"moderator {number}": verdict for number, verdict in enumerate(words, start=1)}
    counts = next((verdict for verdict in verdicts if verdict != "Go on."), None)
    assert problem.score(said) == (counts == "gold") == solve(blinded(problem)).right(said)


def test_a_debate_that_ends_in_a_tie_is_not_solved_whoever_speaks_first() -> None:
    problem = draw_problem(TASKS["debate"], "test", 0)
    for right in ("Alice 3", "Bruno 3", "Clara 3"):
        said = problem.gold_said() | {f"{name} 3": f"{name} has 2 red kites." for name in ("Alice", "Bruno", "Clara")}
        said[right] = problem.gold
        assert problem.score(said) == solve(blinded(problem)).right(said) == 0
