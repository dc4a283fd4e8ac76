"""The ready-made graphs: who speaks, in which order, and who sees what."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from conftest import MakeEngine
from support.graphs import FREE, QUESTION, SHORT
from support.lineage import parents_of, record_of

from choreo_agents import START, ChoreoGraph, Engine, MessageHandle, RunOptions, Sampling
from choreo_agents.models import LoadedModel
from choreo_agents.workflows import debate
from choreo_agents.workflows.graphs.branch_solve_merge import branch_solve_merge
from choreo_agents.workflows.graphs.direct import direct
from choreo_agents.workflows.graphs.multi_qa import multi_qa
from choreo_agents.workflows.graphs.tree_of_thoughts import FINALIST, THINKER, VOTER, tree_of_thoughts

WARM = FREE.model_copy(update={"max_tokens": 16})  # enough for the longest ballot, which is spelled in bytes
GRAPHS: dict[str, Any] = {
    "tree": lambda: tree_of_thoughts(branches=2, voters=2, depth=2, keep=2, system="Root.", sampling=WARM),
    "tree of words": lambda: tree_of_thoughts(branches=2, voters=1, visibility="reencoded", sampling=WARM),
    "parts": lambda: branch_solve_merge(["Write part 1.", "Write part 2."], plan="Plan.", merge="All.", sampling=SHORT),
    "questions, serial": lambda: multi_qa(["Who?", "Why?"], notes="Notes.", sampling=SHORT),
    "questions, parallel": lambda: multi_qa(["Who?", "Why?"], layout="parallel", sampling=SHORT),
    "direct": lambda: direct(system="Root.", private="Notes.", prompt="Answer.", sampling=SHORT),
    "debate": lambda: debate({"alice": None, "bruno": None}, rounds=2, revise="Again.", sampling=SHORT),
}


def authors(state: dict[str, Any]) -> list[str]:
    return [entry["author"] for entry in state["handles"]]


def said(state: dict[str, Any], author: str) -> list[MessageHandle]:
    return [MessageHandle.model_validate(entry["handle"]) for entry in state["handles"] if entry["author"] == author]


def parents(engine: Engine, handle: MessageHandle) -> list[MessageHandle]:
    return [parent.handle for parent in parents_of(engine, handle)]


def seen(engine: Engine, handle: MessageHandle) -> list[str | None]:
    return [parent.author for parent in parents_of(engine, handle)]


def last_asked(engine: Engine, handle: MessageHandle) -> str:
    return engine.text(parents(engine, handle)[-1])


@pytest.mark.parametrize("name", GRAPHS)
def test_each_runs_on_every_engine_and_can_be_audited(make_engine: MakeEngine, name: str) -> None:
    structure = []
    for method in ("choreo", "baseline", "naive"):
        graph: ChoreoGraph = GRAPHS[name]()
        before = graph.audit()
        app = graph.compile(engine=make_engine(method=method))
        state = app.invoke(QUESTION)
        after = app.audit(state)
        assert {f.context for f in after.findings} <= {context.name for context in before.contexts}
        assert app.get_graph().draw_mermaid()
        structure.append(sorted((e["author"], e["superstep"], e["branch"], e["call"]) for e in state["handles"]))
    assert structure[0] == structure[1] == structure[2]


# Tree of thoughts


def tree(**options: Any) -> ChoreoGraph:
    return tree_of_thoughts(
        **({"branches": 3, "voters": 2, "system": "Root.", "think": "Think.", "vote": "Who is right?"} | options),
        answer="Answer.",
        sampling=WARM,
    )


def test_a_tree_of_one_level(engine: Engine) -> None:
    state = tree().compile(engine=engine).invoke(QUESTION)
    assert authors(state) == [START, *[THINKER] * 3, *[VOTER] * 2, FINALIST]
    candidates = said(state, THINKER)
    for number, candidate in enumerate(candidates, start=1):
        assert last_asked(engine, candidate) == engine.chat.turn("user", "Think.").text
        assert engine.text(candidate).startswith(engine.chat.header(f"Candidate {number}").text)
    for vote in said(state, VOTER):
        assert parents(engine, vote)[2:-1] == candidates, "every voter sees all candidates, in order"
        assert last_asked(engine, vote) == engine.chat.turn("user", "Who is right?").text
    [last] = said(state, FINALIST)
    assert seen(engine, last)[:2] == ["public root", START] and last_asked(engine, last).endswith("Answer.<|end|>")
    [[kept]] = state["kept"]
    [elected] = [MessageHandle.model_validate(e["handle"]) for e in state["handles"] if e["message_id"] == kept]
    assert parents(engine, last)[2:-1] == [elected], "the last speaker sees the best thought, no other and no vote"


def test_a_tree_of_two_levels_goes_on_from_those_that_it_keeps(engine: Engine) -> None:
    app = tree(branches=2, keep=2, depth=2, go_on="Go on.", vote=["Who is right?", "Check it."]).compile(engine=engine)
    state = app.invoke(QUESTION)
    assert authors(state) == [START, *[THINKER] * 2, *[VOTER] * 2, *[THINKER] * 4, *[VOTER] * 2, FINALIST]
    by_id = {entry["message_id"]: MessageHandle.model_validate(entry["handle"]) for entry in state["handles"]}
    first, second = said(state, THINKER)[:2], said(state, THINKER)[2:]
    roots = [[each for each in parents(engine, thought) if each in first] for thought in second]
    assert [len(root) for root in roots] == [1] * 4 and roots[0] == roots[1] != roots[2] == roots[3]
    assert all(last_asked(engine, thought) == engine.chat.turn("user", "Go on.").text for thought in second)
    names = [engine.chat.header(f"Candidate {number}").text for number in range(1, 7)]
    assert [engine.text(t).startswith(name) for t, name in zip([*first, *second], names, strict=True)] == [True] * 6
    assert not any(VOTER in seen(engine, thought) for thought in second)
    votes = said(state, VOTER)
    assert [last_asked(engine, vote) for vote in votes] == [
        engine.chat.turn("user", words).text for words in ("Who is right?", "Check it.") * 2
    ]
    in_view = [{*parents(engine, vote)} & {*first, *second} for vote in votes]
    assert in_view == [{*first}] * 2 + [{*first, *second}] * 2, "later voters see whole thoughts"
    for one, other in state["candidates"]:
        assert by_id[one] in parents(engine, by_id[other]), "each thought is on record with what it goes on from"
    assert len(state["kept"]) == 2 and all(len(thought) == 2 for thought in state["kept"])
    [last] = said(state, FINALIST)
    assert parents(engine, last)[2:-1] == [by_id[message] for message in state["kept"][0]]


def test_what_each_voter_says_decides_who_is_kept(embedded: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(embedded, kv_budget_bytes=1 << 26)
    result = re.compile(r"\d+\.$")
    graph = tree_of_thoughts(
        branches=6,
        voters=3,
        system="Work it out in steps.",
        vote="Which result is right?",
        answer="Check it.",
        answer_prefix="I vote for",
        ballot=lambda _, words: found.group() if (found := result.search(words)) else None,
        speakers=["Henry", "Grace", "Alice", "Bruno", "Clara", "David", "Emma", "Felix"],
        sampling=Sampling(temperature=0.7, max_tokens=64),
    )
    question = {"messages": [("user", "Start at 5. Add 3. Take 2. Add 9.")]}
    state = graph.compile(engine=engine).invoke(question, {"configurable": {"choreo": RunOptions(seed=7)}})
    words = {message.id: message.text for message in state["messages"]}
    thoughts = [message.text.split()[-1] for message in state["messages"] if message.name == THINKER]
    assert thoughts[0] == "14.", "the first of them is wrong"
    [[kept]] = state["kept"]
    assert words[kept].endswith("The result is 15.")
    assert state["messages"][-1].text.endswith("6 plus 9 is 15, right. The result is right.")


def test_votes_of_each_level_count_for_its_own_candidates(engine: Engine) -> None:
    """All words are forced: of the candidates 1 and 2 the second is elected, of 3 and 4, which go on, the fourth."""

    def words(text: str) -> tuple[int, ...]:
        return (*engine.model.encode(f" {text}"), *engine.model.encode(engine.chat.turn_end)[:1])

    replay: dict[Any, Any] = {(FINALIST, 5, 0, 0): words("Answer.")}
    for branch in range(2):
        replay |= {(THINKER, level, branch, 0): words(f"Part {level} {branch}.") for level in (1, 3)}
        replay |= {(VOTER, level, branch, 0): words(f"Candidate {level}.") for level in (2, 4)}
    app = tree(branches=2, depth=2).compile(engine=engine)
    state = app.invoke(QUESTION, {"configurable": {"choreo": RunOptions(replay=replay)}})
    said_by_id = {message.id: message.text for message in state["messages"]}
    assert [[said_by_id[each] for each in thought] for thought in state["kept"]] == [["Part 1 1.", "Part 3 1."]]


def test_later_speakers_can_see_fresh_encodings_of_thoughts(engine: Engine) -> None:
    state = tree(visibility="reencoded", depth=2, branches=2).compile(engine=engine).invoke(QUESTION)
    thoughts = {*said(state, THINKER)}
    for author in (VOTER, FINALIST):
        for handle in said(state, author):
            assert not thoughts & {*engine.inspect.ancestors(handle)} and THINKER in seen(engine, handle)
    [last] = said(state, FINALIST)
    copies = [parent for parent in parents_of(engine, last) if parent.author == THINKER]
    by_id = {entry["message_id"]: MessageHandle.model_validate(entry["handle"]) for entry in state["handles"]}
    assert [list(copy.tokens) for copy in copies] == [engine.tokens(by_id[each]) for each in state["kept"][0]]


@pytest.mark.parametrize("name", ["branches", "voters", "depth", "keep"])
@pytest.mark.parametrize("number", [0, -1])
def test_a_tree_of_nothing_is_refused(name: str, number: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not {number}"):
        tree_of_thoughts(**{name: number})


def test_fewer_candidates_than_seats_are_all_kept(engine: Engine) -> None:
    state = tree(branches=1, keep=3, depth=2, voters=1).compile(engine=engine).invoke(QUESTION)
    assert authors(state) == [START, THINKER, VOTER, THINKER, VOTER, FINALIST]
    assert [len(thought) for thought in state["kept"]] == [2]


# Branch, solve, merge


def test_parts_are_solved_apart_and_merged_in_their_order(engine: Engine) -> None:
    asked = ["Write part 1.", "Write part 2.", "Write part 3."]
    graph = branch_solve_merge(
        asked,
        system="Root.",
        plan="Plan it.",
        merge="Write all.",
        speakers=["Emma", "David", "Zoe", "Mia"],
        sampling=WARM,
    )
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert authors(state) == [START, "planner", "solver", "solver", "solver", "merger"]
    [plan], parts, [merged] = (said(state, name) for name in ("planner", "solver", "merger"))
    assert last_asked(engine, plan) == engine.chat.turn("user", "Plan it.").text
    for part, told, name in zip(parts, asked, ("Zoe", "Mia", "Zoe"), strict=True):
        assert seen(engine, part) == ["public root", START, "planner", "solver.system"]
        assert last_asked(engine, part) == engine.chat.turn("user", told).text
        assert engine.text(part).startswith(engine.chat.header(name).text)
    assert parents(engine, merged)[2:-1] == [plan, *parts]
    assert last_asked(engine, merged) == engine.chat.turn("user", "Write all.").text
    assert engine.text(merged).startswith(engine.chat.header("David").text)


@pytest.mark.parametrize("strategy", ["parallel", "text"])
def test_parts_can_be_merged_otherwise(engine: Engine, strategy: Any) -> None:
    graph = branch_solve_merge(["Write part 1.", "Write part 2."], strategy=strategy, sampling=WARM)
    state = graph.compile(engine=engine).invoke(QUESTION)
    [merged] = said(state, "merger")
    offsets = record_of(engine, merged).offsets
    places = [place for place, one in zip(offsets, parents_of(engine, merged), strict=True) if one.author == "solver"]
    assert len(places) == 2 and (len(set(places)) == 1) == (strategy == "parallel")
    assert ({*said(state, "solver")} <= {*engine.inspect.ancestors(merged)}) == (strategy == "parallel")


def test_a_problem_without_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="no parts to solve"):
        branch_solve_merge([])


# Several questions


@pytest.mark.parametrize("notes", [None, "Notes: Ann has 3 red kites."])
@pytest.mark.parametrize("layout", ["serial", "parallel"])
def test_questions_are_encoded_apart_and_placed_as_told(engine: Engine, layout: Any, notes: str | None) -> None:
    asked = ["What does Bob have?", "Who is the friend of Ann?", "Why?"]
    graph = multi_qa(asked, layout=layout, system="Root.", notes=notes, prompt="Answer all.", sampling=SHORT)
    state = graph.compile(engine=engine).invoke(QUESTION)
    names = [f"question {number}" for number in (1, 2, 3)]
    assert authors(state) == [START, *names, "answerer"]
    assert len({entry["superstep"] for entry in state["handles"] if entry["author"] in names}) == 1
    [answer] = said(state, "answerer")
    assert last_asked(engine, answer) == engine.chat.turn("user", "Answer all.").text
    before = ["public root", "answerer.system", START] if notes else ["public root", START]
    assert seen(engine, answer) == [*before, *names, "answerer.system"]
    offsets = record_of(engine, answer).offsets
    shown = {one.author: (one, place) for one, place in zip(parents_of(engine, answer), offsets, strict=True)}
    for name, words in zip(names, asked, strict=True):
        one, _ = shown[name]
        assert engine.text(one.handle) == engine.chat.turn("user", words).text
        assert [parent.author for parent in parents_of(engine, one.handle, answer)] == before[:-1], (
            "no question has seen another"
        )
    places = [shown[name][1] for name in names]
    lengths = [shown[name][0].handle.length for name in names]
    if layout == "serial":
        assert [later - place for place, later in pairwise(places)] == lengths[:-1]
    else:
        assert len(set(places)) == 1 and offsets[-1] == places[0] + max(lengths)


def test_no_question_and_no_such_layout_are_refused() -> None:
    with pytest.raises(ValueError, match="no question to answer"):
        multi_qa([])
    with pytest.raises(ValueError, match="layout must be 'serial' or 'parallel', not 'sequential'"):
        multi_qa(["Who?"], layout="sequential")  # type: ignore[arg-type]


# Direct, and a debate without notes


@pytest.mark.parametrize("private", [None, "Notes: Ann has 3 red kites."])
def test_one_agent_answers_at_once(engine: Engine, private: str | None) -> None:
    graph = direct(system="Root.", private=private, prompt="Answer.", speaker="Alice", sampling=SHORT)
    state = graph.compile(engine=engine).invoke(QUESTION)
    [answer] = said(state, "solver")
    own = ["solver.system"] if private else []
    assert seen(engine, answer) == ["public root", *own, START, "solver.system"]
    question = parents_of(engine, answer)[-2]
    assert [parent.author for parent in parents_of(engine, question.handle, answer)] == ["public root", *own], (
        "it is read in the light of the notes"
    )
    assert last_asked(engine, answer) == engine.chat.turn("user", "Answer.").text
    assert engine.text(answer).startswith(engine.chat.header("Alice").text)


def test_debaters_without_notes_read_one_question_and_are_asked_to_revise(engine: Engine) -> None:
    notes = {"alice": None, "bruno": "Notes: Ann has 3 red kites.", "clara": None}
    graph = debate(notes, rounds=2, system="Root.", revise="Again.", sampling=WARM)
    modes = {reader: rules[START].mode.name for reader, rules in graph.visibility_table().items() if reader in notes}
    assert modes == {"alice": "shared", "bruno": "reencoded", "clara": "shared"}
    state = graph.compile(engine=engine).invoke(QUESTION)
    assert sorted(authors(state)) == sorted([START, *[name for name in notes for _ in range(2)]])
    [question] = said(state, START)
    for name, own_notes in notes.items():
        first, second = said(state, name)
        others = [other for other in notes if other != name]
        own = [] if own_notes is None else [f"{name}.system"]
        assert seen(engine, first) == ["public root", *own, START]
        assert (question in parents(engine, first)) == (own_notes is None)
        assert seen(engine, second) == ["public root", *own, START, name, *others, f"{name}.system"]
        assert parents(engine, second)[-4:-1] == [first, *(said(state, other)[0] for other in others)]
        assert last_asked(engine, second) == engine.chat.turn("user", "Again.").text
    assert state["rounds_over"] == 0
