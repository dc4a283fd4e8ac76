"""Workflows as something to do: what agents may say, and what the end of a run is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from pydantic import ValidationError

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph import START
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.answers import answers_of
from choreo_agents.workflows.cases import CASES, MOST_AGENTS, REPORTS, Case, Result, debate_problem, problem
from choreo_agents.workflows.phrasing import Dialect, Prompts, load_prompts

EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
SIDES = ("The affirmative side is right.", "The negative side is right.")


def ended(*spoken: tuple[str, str]) -> dict[str, Any]:
    """The state of a run in which these nodes said these words."""
    messages = [AIMessage(words, id=f"m{number}") for number, (_, words) in enumerate(spoken)]
    handles = [{"author": node, "message_id": f"m{number}"} for number, (node, _) in enumerate(spoken)]
    return {"messages": messages, "handles": handles}


def judged(
    name: str, item: Mapping[str, Any], *spoken: tuple[str, str], dialect: Dialect = "chat", **options: Any
) -> Result:
    case = CASES[name]
    prompts = load_prompts(name, dialect)
    made = case.options.model_validate(options)
    return case.judge(case.item.model_validate(item), made, prompts, ended(*spoken))


def agent_of(name: str, node: str, dialect: Dialect, **options: Any) -> Any:
    case = CASES[name]
    made = case.options.model_validate(options)
    graph = case.play(problem(name, 0), made, load_prompts(name, dialect), Sampling()).graph
    return graph.nodes[node].runnable


def test_what_a_node_has_said() -> None:
    state = ended((START, "Who?"), ("ann", "One."), ("bob", "Two."), ("ann", "Three."))
    assert answers_of(state, "ann") == ["One.", "Three."] and answers_of(state, "nobody") == []


@EVERY_CASE
def test_variants_change_options_that_there_are(case: Case) -> None:
    for variant in case.variants.values():
        changed = case.options.model_validate(case.options().model_dump() | dict(variant.changes))
        assert all(getattr(changed, name) == value for name, value in variant.changes.items())
    assert {"choreo", "baseline", "naive"} <= set(case.variants)
    for name in ("choreo", "baseline", "naive"):
        assert case.variants[name].method == name


@EVERY_CASE
def test_options_that_there_are_not_are_refused(case: Case) -> None:
    with pytest.raises(ValidationError):
        case.options.model_validate({"nonsense": 1})


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("Well.\nAnswer: 12", "12", 1.0),
        ("Answer: 112", "112", 0.0),
        ("Answer: -12", "-12", 0.0),
        ("It is 12.", "It is 12.", 1.0),
        ("", "", 0.0),
    ],
)
def test_one_call(reply: str, answer: str, score: float) -> None:
    assert judged("direct", {"question": "?", "answer": "12"}, ("solver", reply)) == Result(answer, score)
    assert judged("direct", {"question": "?"}, ("solver", reply)) == Result(answer, None)


def test_one_call_of_the_embedded_model_is_read_by_what_it_was_given() -> None:
    """Sums end with the result; answers from notes begin with it."""
    spoken = ("solver", "Ann has 3. Bob has 5.")
    for item, answer in (({}, "Bob has 5."), ({"notes": ["n"]}, "Ann has 3.")):
        assert judged("direct", {"question": "?", **item}, spoken, dialect="embedded").answer == answer


def debated(*rounds: Sequence[str]) -> list[tuple[str, str]]:
    return [pair for words in rounds for pair in zip(("Alice", "Bruno", "Clara"), words, strict=True)]


def test_a_debate_ends_with_what_most_say_last() -> None:
    item = {"question": "?", "answer": "5"}
    spoken = debated(["Answer: 5", "Answer: 7", "Answer: 7"], ["Answer: 7", "Answer: 5.", "answer: 5"])
    assert judged("debate", item, *spoken) == Result("5.", 1.0, {"first agent's first answer": 1.0})
    spoken = debated(["Answer: 5", "Answer: 5", "Answer: 5"], ["Answer: 7", "Answer: 5", "Answer: 7"])
    assert judged("debate", item, *spoken) == Result("7", 0.0, {"first agent's first answer": 1.0})
    assert judged("debate", {"question": "?"}, *spoken) == Result("7", None, {})


def test_more_agents_than_names_have_numbers() -> None:
    case = CASES["debate"]
    prompts = Prompts({**load_prompts("debate", "chat").texts, "agents": ["Ann"]})
    made = case.options.model_validate({"agents": 3})
    graph = case.play(problem("debate", 0), made, prompts, Sampling()).graph
    assert list(graph.nodes)[:3] == ["Ann", "Agent2", "Agent3"]


def test_a_debate_in_turns_ends_with_the_side_that_is_right() -> None:
    item = {"question": "?", "answer": "5"}
    first = [("affirmative", "Answer: 7"), ("negative", "Answer: 5"), ("moderator", "Go on.")]
    second = [("affirmative", "Answer: 6"), ("negative", "Answer: 5!")]
    for side, answer, score in ((0, "6", 0.0), (1, "5!", 1.0)):
        found = judged("iterative_debate", item, *first, *second, ("moderator", SIDES[side]), rounds=4)
        assert found == Result(answer, score, {"share of rounds": 0.5})
    assert judged("iterative_debate", {"question": "?"}, *second, ("moderator", SIDES[0])).score is None


def test_a_moderator_of_the_embedded_model_names_the_result() -> None:
    spoken = [
        ("affirmative", "1 plus 4 is 5. The result is 5."),
        ("negative", "No."),
        ("moderator", "The result is 5."),
    ]
    for right, score in (("5", 1.0), ("7", 0.0), (None, None)):
        found = judged("iterative_debate", {"question": "?", "answer": right}, *spoken, dialect="embedded", rounds=2)
        assert found == Result("The result is 5.", score, {"share of rounds": 0.5})


@pytest.mark.parametrize(
    ("dialect", "verdicts"),
    [("chat", list(SIDES)), ("embedded", ["The result is 5.", "The result is 6."])],
)
def test_a_moderator_says_a_verdict_or_lets_them_go_on_but_for_the_last_round(
    dialect: Dialect, verdicts: list[str]
) -> None:
    moderator = agent_of("iterative_debate", "moderator", dialect, rounds=3)
    one = [("affirmative", "4 is 5. The result is 5."), ("negative", "The result is 9.")]
    two = [("affirmative", "The result is 6."), ("negative", "The result is 5.")]
    asked, go_on = (START, "?"), ("moderator", "Go on.")
    first = verdicts if dialect == "chat" else verdicts[:1]
    assert moderator.choices(ended(asked, *one)) == [*first, "Go on."]
    assert moderator.choices(ended(asked, *one, go_on, *two)) == [*verdicts, "Go on."]
    assert moderator.choices(ended(asked, *one, go_on, *two, go_on, *two)) == verdicts
    assert agent_of("iterative_debate", "moderator", dialect, rounds=1).choices(ended(asked, *one)) == first


def test_where_nobody_has_answered_there_is_no_verdict() -> None:
    moderator = agent_of("iterative_debate", "moderator", "embedded", rounds=2)
    assert moderator.choices(ended(("affirmative", ""), ("negative", "Check it."))) == ["Go on."]


def test_a_tree_answers_with_its_last_speaker() -> None:
    item = {"question": "?", "answer": "5"}
    spoken = [
        ("thinker", "Answer: 5"),
        ("thinker", "Answer: 6"),
        ("voter", "I vote for Candidate 2."),
        ("finalist", "Answer: 5"),
    ]
    assert judged("tree_of_thoughts", item, *spoken) == Result("5", 1.0, {"right candidates": 0.5})
    spoken[-1] = ("finalist", "Answer: 6")
    assert judged("tree_of_thoughts", item, *spoken) == Result("6", 0.0, {"right candidates": 0.5})
    assert judged("tree_of_thoughts", {"question": "?"}, *spoken) == Result("6", None, {})


def grown(*thoughts: str) -> dict[str, Any]:
    state = ended((START, "?"), *(("thinker", words) for words in thoughts))
    ids = [[entry["message_id"]] for entry in state["handles"][1:]]
    return state | {"candidates": ids, "thoughts": len(ids)}


def test_votes_name_candidates_or_results() -> None:
    state = grown("1 plus 4 is 5. The result is 5.", "The result is 6.", "The result is 5.", "no end", "", ".")
    by_name = agent_of("tree_of_thoughts", "voter", "chat").choices(state)
    assert by_name == [f"Candidate {number}." for number in range(1, 7)]
    by_value = agent_of("tree_of_thoughts", "voter", "embedded").choices(state)
    assert by_value == ["5.", "6."]


def test_a_merge_is_worth_the_concepts_that_it_covers() -> None:
    item = {"question": "?", "concepts": ["red kite", "boat", "drum", "cup"]}
    spoken = [
        ("solver", "A red kite and a boat."),
        ("solver", "A drum."),
        ("solver", "Nothing."),
        ("merger", "The Red Kite and a drum, a cup, boats."),
    ]
    found = judged("branch_solve_merge", item, *spoken)
    assert found == Result("The Red Kite and a drum, a cup, boats.", 0.75, {"of part 1": 0.5, "of part 2": 1.0})


def test_several_questions_count_if_all_are_answered() -> None:
    item: dict[str, Any] = {"questions": ["a?", "b?"], "answers": ["3", "11"]}
    assert judged("multi_qa", item, ("answerer", "3 and 11")) == Result(
        "3 and 11", 1.0, {"question 1": 1.0, "question 2": 1.0}
    )
    assert judged("multi_qa", item, ("answerer", "11")) == Result("11", 0.0, {"question 1": 0.0, "question 2": 1.0})
    assert judged("multi_qa", {"questions": ["a?"]}, ("answerer", "11")) == Result("11", None, {})
    with pytest.raises(ValidationError, match="got 2 questions, but 1 answers"):
        judged("multi_qa", item | {"answers": ["3"]}, ("answerer", "3"))


def test_players_are_judged_by_their_decisions() -> None:
    spoken = [("alice", "I cooperate."), ("bob", "I defect."), ("alice", "I defect."), ("bob", "I cooperate.")]
    item = {"both": 9, "none": 3}
    assert judged("prisoners_dilemma", item, *spoken) == Result("I cooperate.", 1.0, {"Alice cooperates": 0.0})
    found = judged("prisoners_dilemma", item, *spoken[:2])
    assert found == Result("I defect.", 0.0, {"Alice cooperates": 1.0})


@pytest.mark.parametrize("dialect", ["chat", "embedded"])
@pytest.mark.parametrize("player", ["alice", "bob"])
def test_players_decide_between_two_and_talk_as_they_like(dialect: Dialect, player: str) -> None:
    agent = agent_of("prisoners_dilemma", player, dialect, talks=2)
    talked = [("alice", "I will."), ("bob", "So will I.")]
    assert not agent.choices(ended()) and not agent.choices(ended(*talked))
    assert list(agent.choices(ended(*talked, *talked))) == ["I cooperate.", "I defect."]


def options_with_limits() -> list[tuple[Case, str, Any]]:
    found = []
    for case in CASES.values():
        for name, field in case.options.model_fields.items():
            for limit in field.metadata:
                least, most = getattr(limit, "ge", None), getattr(limit, "le", None)
                found += [(case, name, least - 1)] if least is not None else []
                found += [(case, name, most + 1)] if most is not None else []
    return found


@pytest.mark.parametrize(("case", "name", "value"), options_with_limits())
def test_options_have_limits(case: Case, name: str, value: int) -> None:
    with pytest.raises(ValidationError):
        case.options.model_validate({name: value})


@EVERY_CASE
def test_what_is_shipped_has_a_right_answer_that_counts_as_right(case: Case) -> None:
    item: Any = problem(case.name, 1)
    golden = {
        "direct": lambda: [("solver", f"So. The result is {item.answer}.")],
        "debate": lambda: [(name, item.answer) for name in ("Alice", "Bruno", "Clara")],
        "iterative_debate": lambda: [("affirmative", "x."), ("moderator", f"The result is {item.answer}.")],
        "tree_of_thoughts": lambda: [("thinker", "1."), ("finalist", f"The result is {item.answer}.")],
        "branch_solve_merge": lambda: [("merger", " ".join(f"{each}." for each in item.concepts))],
        "multi_qa": lambda: [("answerer", " ".join(item.answers))],
        "prisoners_dilemma": lambda: [("alice", "I defect."), ("bob", "I cooperate.")],
    }
    state, prompts = ended(*golden[case.name]()), load_prompts(case.name, "embedded")
    assert case.judge(item, case.options(), prompts, state).score == 1.0


@EVERY_CASE
def test_twenty_different_problems_are_taken_in_turn(case: Case) -> None:
    found = [problem(case.name, number) for number in range(20)]
    assert len({item.model_dump_json(exclude={"id"}) for item in found}) == 20
    assert problem(case.name, 27) == found[7]


def test_a_debate_has_a_record_and_notes_for_everybody_who_may_take_part() -> None:
    for number in range(20):
        item: Any = problem("debate", number)
        assert len(item.record) == REPORTS and len(item.notes) == MOST_AGENTS
        assert item.answer in " ".join(item.record)
        assert sum(item.answer in notes for notes in item.notes) == 1


def test_a_record_is_read_before_the_question() -> None:
    case = CASES["debate"]
    given = {"question": "Who?", "notes": ["a", "b"], "record": ["One.", "Two."]}
    item, options = case.item.model_validate(given), case.options.model_validate({"agents": 2})
    played = case.play(item, options, load_prompts("debate", "embedded"), Sampling())
    assert played.messages == (("user", "One."), ("user", "Two."))
    assert played.graph.nodes["Alice"].runnable.prompt({"rounds_over": 0}) == "Who?"
    alone = case.play(item.model_copy(update={"record": ()}), options, load_prompts("debate", "embedded"), Sampling())
    assert alone.messages == (("user", "Who?"),)


@pytest.mark.parametrize("agents", range(3, 9))
@pytest.mark.parametrize("reports", [1, 4, 9])
def test_one_debater_knows_the_answer_and_the_record_tells_the_others(agents: int, reports: int) -> None:
    for number in range(20):
        found = debate_problem(number, agents=agents, reports=reports)
        assert len(found.record) == reports and len(found.notes) == agents
        assert str(found.answer) in " ".join(found.record)
        asked = f"{str(found.answer).split()[0]} has "
        told = {place: str(found.answer) in notes for place, notes in enumerate(found.notes) if asked in notes}
        assert sorted(told.values()) == [False, True]
        assert found.mistaken == [place for place, is_right in told.items() if not is_right]


def test_fewer_debaters_than_notes_tell_something_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least 3 agents, not 2"):
        debate_problem(0, agents=2, reports=9)
