"""A debate over one record: what every method encodes, which no machine changes, and who sees what."""

from __future__ import annotations

import pytest
from conftest import MakeEngine
from support.debates import debate_setting

from choreo_agents.graph import START
from choreo_agents.graph.comparing import METHODS, ComparedInput
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.workflows import debate
from choreo_agents.workflows.playing import Setting, compared

SEEDS = (1, 2, 7)
NOTES = {"alice": "Notes: Ann has 3 red kites.", "bruno": "Notes: Bob has 5 blue boats.", "clara": None}


@pytest.fixture(scope="module", params=SEEDS)
def debated(request: pytest.FixtureRequest, embedded: LoadedModel) -> tuple[Setting, ComparedInput]:
    """A debate under each method, all in the baseline's words."""
    setting = debate_setting(embedded, request.param, rounds=3)
    return setting, compared(setting, 1, lambda done, of: None).inputs[0]


def test_a_prefix_cache_encodes_the_record_for_every_agent_and_choreo_once(
    debated: tuple[Setting, ComparedInput],
) -> None:
    choreo, baseline, naive = (debated[1].costs[method] for method in METHODS)
    assert baseline.tokens_encoded >= 2 * choreo.tokens_encoded
    assert naive.tokens_encoded >= 7 * choreo.tokens_encoded
    assert naive.tokens_reused == 0 and choreo.tokens_reused > 0


def test_choreo_encodes_every_turn_once(debated: tuple[Setting, ComparedInput], embedded: LoadedModel) -> None:
    (setting, run), chat = debated, embedded.chat
    problem = setting.item
    turns = [
        chat.root(setting.setup.prompts("system")).text,
        *(chat.turn("user", report).text for report in problem.record),
        *(chat.turn("system", notes).text for notes in problem.notes),
        *[chat.turn("user", problem.question).text] * len(problem.notes),
        *(chat.turn("assistant", words, place[0]).text for place, words in run.words["baseline"].items()),
    ]
    assert run.costs["choreo"].tokens_encoded == sum(len(embedded.encode(turn)) for turn in turns)


def test_the_record_is_read_by_all_and_notes_and_questions_by_one_each(make_engine: MakeEngine) -> None:
    graph = debate(NOTES, rounds=2, system="Root.", question="Who?", revise="Again.", sampling=Sampling(max_tokens=4))
    table = graph.visibility_table()
    assert {table[name][START].mode.name for name in NOTES} == {"shared"}
    engine = make_engine()
    state = graph.compile(engine=engine).invoke({"messages": [("user", "Report 1: ..."), ("user", "Report 2: ...")]})
    record = [entry["handle"]["id"] for entry in state["handles"] if entry["author"] == START]
    assert len(record) == 2
    for name, notes in NOTES.items():
        own = [MessageHandle.model_validate(e["handle"]) for e in state["handles"] if e["author"] == name]
        assert len(own) == 2
        for number, handle in enumerate(own):
            read = engine.inspect.records([handle])[-1].parents
            assert [parent.id for parent in read if parent.id in record] == record
            asked = [engine.text(parent) for parent in read]
            assert asked.count(engine.chat.turn("user", "Who?").text) == 1
            assert asked.count(engine.chat.turn("user", "Again.").text) == number
            told = [
                each for each in NOTES.values() if each is not None and engine.chat.turn("system", each).text in asked
            ]
            assert told == ([] if notes is None else [notes])
        first = [engine.text(parent) for parent in engine.inspect.records([own[0]])[-1].parents]
        assert first[-1] == engine.chat.turn("user", "Who?").text, "behind all that it is about"
