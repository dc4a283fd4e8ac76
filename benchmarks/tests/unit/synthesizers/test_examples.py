"""The three sources of a synthesizer's training data, and their mixture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

import pytest
from choreo_bench.embedded.transcripts import TranscriptTurn
from choreo_bench.language.synthesis import HELD_OUT, SYNTHESIS_TASKS, Parts
from choreo_bench.synthesizers.examples import (
    DIALOGUE,
    LEARNT_TASKS,
    Example,
    Views,
    asample_answers,
    cut,
    dialogue,
    distilled,
    draw_training_problems,
    fan_of,
    tasks,
)
from conftest import MakeEngine

from choreo_agents.models import LoadedModel
from choreo_agents.synthesis.placing import SYNTHESIS_LAYOUTS
from choreo_agents.training.synthesis_traces import text_trace
from choreo_agents.training.trace import Trace

EVERY = Views(SYNTHESIS_LAYOUTS, mapped=True, adapter="merge")


def learnt(trace: Trace) -> list[tuple[int, ...]]:
    return [m.tokens[m.learn[0] : m.learn[1]] for m in trace.messages if m.learn is not None]


def take(examples: Iterator[Example], count: int) -> list[Example]:
    return list(islice(examples, count))


@pytest.mark.parametrize("source", [dialogue, tasks])
def test_an_example_depends_on_seed_and_number_only(tiny: LoadedModel, source: Any) -> None:
    examples = take(source(tiny, views=EVERY), 12)
    assert examples == take(source(tiny, views=EVERY), 12)
    assert take(source(tiny, views=EVERY, first=7), 5) == examples[7:]
    assert take(source(tiny, views=EVERY, seed=1), 12) != examples
    assert len({example.trace.id for example in examples}) == 12


@pytest.mark.parametrize("source", [dialogue, tasks])
def test_cache_and_text_learn_the_same_tokens(tiny: LoadedModel, source: Any) -> None:
    for example in take(source(tiny, views=EVERY), 150):
        assert example.teacher is not None and learnt(example.trace) == learnt(example.teacher)
        assert all(m.mapped is False and m.adapter is None for m in example.teacher.messages)
        branches = [m for m in example.trace.messages if m.mapped]
        assert 2 <= len(branches) <= 8
        for message in example.trace.messages:
            assert (message.adapter == "merge") == bool({m.name for m in branches} & set(message.parents))
    assert take(source(tiny, views=Views(text=False)), 1)[0].teacher is None


def test_every_layout_is_drawn(tiny: LoadedModel) -> None:
    drawn = [take(tasks(tiny, views=Views((layout,), text=False)), 40) for layout in SYNTHESIS_LAYOUTS]
    mixed = take(tasks(tiny, views=Views(SYNTHESIS_LAYOUTS, text=False)), 40)
    found = [{place for place, example in enumerate(mixed) if example == one[place]} for one in drawn]
    assert all(found) and set.union(*found) == set(range(40))


def test_tasks_are_of_the_train_split_and_the_held_out_one_is_not_among_them(tiny: LoadedModel) -> None:
    problems = [draw_training_problems(0, number, LEARNT_TASKS, 1.0)[0] for number in range(300)]
    assert {problem.split for problem in problems} == {"train"}
    assert {problem.task for problem in problems} == set(SYNTHESIS_TASKS) - {HELD_OUT}
    assert {len(problem.branches) for problem in problems} == set(range(2, 9))
    easy = [draw_training_problems(0, number, LEARNT_TASKS, 0.0)[0] for number in range(100)]
    assert {len(problem.branches) for problem in easy} == {2}
    assert "multi_document" not in DIALOGUE, "what the held-out task is made of"


def test_branches_with_several_questions_are_encoded_once(tiny: LoadedModel) -> None:
    examples = {n: take(tasks(tiny, views=Views(("parallel",), mapped=True), questions=n), 60) for n in (1, 3)}
    asked = {n: [len(learnt(example.trace)) for example in each] for n, each in examples.items()}
    assert set(asked[1]) == {1} and set(asked[3]) == {1, 2, 3}
    for example, several in zip(examples[3], asked[3], strict=True):
        names = [message.name for message in example.trace.messages]
        assert sum(name.startswith("answer") for name in names) in (0, several)
        assert sum(name.startswith("report") for name in names) <= 16, "8 branches and their mapped copies"


TURNS = [
    TranscriptTurn("a", "system", "Answer."),
    TranscriptTurn("b", "user", "What does Ann have?"),
    TranscriptTurn("c", "assistant", "Ann has 3 red kites.", "Alice", learn=True),
    TranscriptTurn("d", "user", "What does Bob have?"),
    TranscriptTurn("e", "assistant", "Bob has 5 blue boats.", "Alice", learn=True),
]


def test_a_dialogue_is_cut_into_trunk_branches_and_a_rest_that_is_learnt(tiny: LoadedModel) -> None:
    fans = [fan for seed in range(200) if (fan := cut(tiny, Random(seed), TURNS, id="t")) is not None]
    assert len(fans) == 200
    whole = [token for turn in TURNS for token in tiny.encode(tiny.chat.turn(turn.role, turn.text, turn.author))]  # type: ignore[arg-type]
    for fan in fans:
        trace = text_trace(fan)
        assert [token for message in trace.messages for token in message.tokens] == [*tiny.encode("<s>"), *whole]
        assert trace.messages[-1].learn is not None and len(fan.branches) >= 2
        assert not any(words.learn or any(one.learn for one in private) for private, words in fan.branches)
    assert {len(fan.branches) for fan in fans} == {2, 3, 4}
    assert {len(fan.trunk) for fan in fans} == {1, 2, 3}
    assert {bool(private) for fan in fans for private, _ in fan.branches} == {True, False}
    assert {len(learnt(text_trace(fan))) for fan in fans} == {1, 2}


@pytest.mark.parametrize("turns", [TURNS[:2], TURNS[1:3], TURNS[:2] + TURNS[3:4], []], ids=len)
def test_too_short_a_dialogue_is_not_cut(tiny: LoadedModel, turns: list[TranscriptTurn]) -> None:
    assert all(cut(tiny, Random(seed), turns, id="t") is None for seed in range(20))


def test_distilled_answers_are_the_text_synthesizers_own(embedded: LoadedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(embedded, method="baseline", kv_budget_bytes=1 << 26)
    hot = take(distilled(engine, views=EVERY, temperature=1.0, batch=8), 24)
    assert hot == take(distilled(engine, views=EVERY, temperature=1.0, batch=8), 24)
    for example in hot:
        number = int(example.trace.id.split()[2])
        problem = draw_training_problems(0, number, LEARNT_TASKS, 1.0, source="distilled")[0]
        twin = EVERY.example(fan_of(embedded, problem, id="right"), Random(f"synthesis views 0 {number}"))
        assert example.teacher is not None and learnt(example.trace) == learnt(example.teacher)
        assert example.trace.messages[:-1] == twin.trace.messages[:-1], "the same problem in the same layout"
        [answer] = learnt(example.trace)
        assert answer[-1] == embedded.tokenizer.eos_token_id
    numbers = [int(example.trace.id.split()[2]) for example in hot]
    assert numbers == sorted(numbers) and numbers[-1] >= 24, "what is answered wrong is left out"
    tried = take(distilled(engine, views=EVERY, batch=8, most=20), 40)
    assert tried == [example for example, number in zip(hot, numbers, strict=True) if number < 20]
    assert engine.stats().leases == 0


async def test_an_answer_that_does_not_end_is_left_out(make_engine: MakeEngine) -> None:
    """A model of random weights hardly ever ends."""
    engine = make_engine(method="baseline")
    problems = [draw_training_problems(0, number, LEARNT_TASKS, 0.0)[0] for number in range(6)]
    answers = await asample_answers(engine, problems, seeds=range(6))
    assert None in answers
    for problem, answer in zip(problems, answers, strict=True):
        header = engine.model.encode(engine.chat.header(Parts.of(problem).answer.author))
        assert answer is None or (list(answer[: len(header)]) == header and answer[-1] == 2)
    with pytest.raises(ValueError, match="a teacher reads text"):
        await asample_answers(make_engine(), problems, seeds=range(6))
