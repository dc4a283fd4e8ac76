"""Debates over a record: where the truth stands, who knows it, and how long the record is."""

from collections import Counter

import pytest
from choreo_bench.embedded.tokenizer import build_tokenizer
from choreo_bench.language.problem import split_of
from choreo_bench.language.tasks.debate import DEBATE_RULES
from choreo_bench.language.tasks.record_debate import REPORTS, record_debate_problem
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.models.chat.template_analysis import chat_format

TOKENIZER = build_tokenizer()
CHAT = chat_format(TOKENIZER)
seeds = st.integers(0, 10**9)


def sentences(text: str) -> list[str]:
    """What notes or a report say, without their first words."""
    return [f"{sentence}." for sentence in text.partition(": ")[2].removesuffix(".").split(". ")]


@given(seeds, st.integers(2, 8), st.integers(1, REPORTS), st.integers(1, 6), st.data())
def test_the_record_says_what_is_true_and_notes_say_what_the_record_says(
    seed: int, agents: int, reports: int, noted: int, data: st.DataObject
) -> None:
    wrong = data.draw(st.none() | st.integers(0, agents - 1))
    made = record_debate_problem(seed, agents=agents, reports=reports, noted=noted, wrong=wrong)
    record = [sentence for report in made.record for sentence in sentences(report)]
    assert [report.partition(":")[0] for report in made.record] == [f"Report {1 + i}" for i in range(reports)]
    assert record.count(made.answer) == 1 and len(set(record)) == len(record)
    person = made.answer.split()[0]
    assert made.question == f"What does {person} have?" and sum(s.startswith(f"{person} has ") for s in record) == 1
    about = Counter[str]()
    for notes in made.notes:
        held = sentences(notes)
        assert len(held) == len(set(held)) == noted
        for sentence in held:
            if sentence in record:
                about["right"] += sentence == made.answer
            else:
                about["wrong"] += 1
                assert sentence.split()[:2] == [person, "has"]
                assert sentence.split()[2] != made.answer.split()[2] and sentence.split()[3:] == made.answer.split()[3:]
    assert about["right"] == 1 and about["wrong"] == ((agents - 1) // 2 if wrong is None else wrong)


@given(seeds, st.integers(2, 8))
def test_every_record_is_as_long_as_any_other(seed: int, agents: int) -> None:
    record = record_debate_problem(seed, agents=agents).record
    tokens = [len(TOKENIZER.encode(CHAT.turn("user", report).text, add_special_tokens=False)) for report in record]
    assert sum(tokens) == 885


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_a_debate_belongs_to_the_split_that_is_asked_for(split) -> None:
    made = record_debate_problem(5, split=split)
    assert split_of([DEBATE_RULES, made.question, *made.notes, *made.record]) == split
    assert made == record_debate_problem(5, split=split) != record_debate_problem(6, split=split)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"agents": 1}, "between 2 and 8, not 1"),
        ({"agents": 9}, "between 2 and 8, not 9"),
        ({"reports": 0}, f"1 to {REPORTS} reports, not 0"),
        ({"reports": REPORTS + 1}, f"1 to {REPORTS} reports"),
        ({"wrong": 3}, "at least one of 3 agents must be right"),
        ({"wrong": -1}, "at least one of 3 agents must be right"),
        ({"noted": 0}, "notes need"),
    ],
)
def test_what_cannot_be_drawn_is_refused(wanted: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record_debate_problem(0, **wanted)  # type: ignore[arg-type]
