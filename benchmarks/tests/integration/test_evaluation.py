"""Problems played on an engine: what each message sees, where it stands, and how answers are counted."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from choreo_bench.evaluation import evaluate, play, sample_and_vote
from choreo_bench.experiments.eval_language import measure, require_tasks, require_views
from choreo_bench.language import TASKS, Draft, Problem, draw_problem
from choreo_bench.language.scoring import FirstSentence
from conftest import MakeEngine

from choreo_agents.engine import Engine
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.playing import at_once

SHORT = Sampling(max_tokens=6)
GREEDY = Sampling(max_tokens=96)


@pytest.fixture
def two_questions() -> Problem:
    return draw_problem(TASKS["two_questions"], "test", 0)


class Recorder:
    """Stands before an engine and remembers where every message was placed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls: list[tuple[str, list[str], Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def aprefill(self, content: str, parents: Any = (), offsets: Any = None, start: Any = None, **rest: Any):
        self.calls.append((content, [self.engine.text(p) for p in parents], offsets, start))
        return await self.engine.aprefill(content, parents, offsets, start, **rest)

    async def adecode(self, header: str, parents: Any = (), offsets: Any = None, start: Any = None, **rest: Any):
        self.calls.append((header, [self.engine.text(p) for p in parents], offsets, start))
        return await self.engine.adecode(header, parents, offsets, start, **rest)


async def test_every_message_sees_its_parents_in_order(make_engine: MakeEngine, two_questions: Problem) -> None:
    recorder = Recorder(make_engine())
    said = await play(recorder, two_questions, sampling=SHORT)  # type: ignore[arg-type]
    chat = recorder.chat
    turns = {m.name: chat.turn(m.role, m.text, m.author).text for m in two_questions.messages if not m.is_answer}
    _, *calls = recorder.calls
    for message, (content, parents, offsets, start) in zip(two_questions.messages, calls, strict=True):
        assert content.text == turns.get(message.name, chat.header(message.author).text)
        assert parents == [chat.bos, *(turns[name] for name in message.parents)]
        assert offsets is None and start is None
    assert set(said) == {"answer"}


async def test_at_one_offset_what_follows_starts_after_the_longest(
    make_engine: MakeEngine, two_questions: Problem
) -> None:
    recorder = Recorder(make_engine())
    [first_question] = [message for message in two_questions.messages if message.name == "question 1"]
    longer = replace(first_question, text=f"{first_question.text} And what else?")
    messages = tuple(longer if message is first_question else message for message in two_questions.messages)
    await play(recorder, replace(two_questions, messages=messages), sampling=SHORT, layout="parallel")  # type: ignore[arg-type]
    _, parents, offsets, start = recorder.calls[-1]
    root, rules, notes, first, second = (len(recorder.model.encode(text)) for text in parents)
    at = root + rules + notes
    assert offsets == [0, root, root + rules, at, at]
    assert first > second and start == at + first


async def test_everything_is_given_back_whatever_happens(make_engine: MakeEngine, two_questions: Problem) -> None:
    engine = make_engine()
    await play(engine, two_questions, sampling=SHORT)
    assert engine.stats().leases == 0
    with pytest.raises(ValueError, match="author"):
        broken = Recorder(engine)
        broken.adecode = failing  # type: ignore[method-assign]
        await play(broken, two_questions, sampling=SHORT)  # type: ignore[arg-type]
    assert engine.stats().leases == 0


async def failing(*_: Any, **__: Any) -> None:
    raise ValueError("author")


async def test_later_messages_see_what_was_said_not_what_would_be_right(make_engine: MakeEngine) -> None:
    recorder = Recorder(make_engine())
    problem = draw_problem(TASKS["recall"], "test", 1)
    said = await play(recorder, problem, sampling=SHORT)  # type: ignore[arg-type]
    _, parents, _, _ = recorder.calls[-1]
    assert any(said["answer 1"] in text for text in parents)
    assert not any(problem.by_name["answer 1"].text in text for text in parents)


async def test_ordinary_prompts_are_the_chat_template(embedded: LoadedModel, make_engine: MakeEngine) -> None:
    """The baseline's tokens equal greedy decoding of the templated prompt."""
    engine = make_engine(embedded, method="baseline")
    problem = draw_problem(TASKS["majority_vote"], "test", 3)
    said = await play(engine, problem, sampling=GREEDY)
    turns = [{"role": m.role, "content": m.text, "name": m.author} for m in problem.messages if not m.is_answer]
    prompt = (
        embedded.tokenizer.apply_chat_template(turns, tokenize=False)
        + engine.chat.header(problem.messages[-1].author).text
    )
    handle = engine.prefill(prompt[:-7])
    answer = engine.decode(prompt[-7:], [handle], sampling=GREEDY, turn_suffix=engine.chat.turn_end)
    assert said["answer"] == engine.text(answer, special=False).removeprefix(prompt[-7:].split("|>")[-1]).strip()


def test_scores_do_not_depend_on_who_is_played_beside(make_engine: MakeEngine, embedded: LoadedModel) -> None:
    engine = make_engine(embedded, method="baseline")
    tasks = [TASKS["recall"], TASKS["list_union"]]
    together = evaluate(engine, tasks, count=6, seed=3).results
    alone = [evaluate(engine, [task], count=1, seed=seed).results[task.name] for task in tasks for seed in range(3, 9)]
    for index, task in enumerate(tasks):
        own = alone[index * 6 : (index + 1) * 6]
        assert together[task.name].solved.right == sum(result.solved.right for result in own)
        assert together[task.name].share_right == pytest.approx(sum(result.share_right for result in own) / 6)


def test_problems_share_the_engines_steps(make_engine: MakeEngine, embedded: LoadedModel) -> None:
    engine = make_engine(embedded, method="baseline", kv_budget_bytes=1 << 27)
    evaluate(engine, [TASKS["two_questions"]], count=16)
    assert engine.stats().rows_per_step > 4


@dataclass(frozen=True)
class Sure:
    """One problem, always the same."""

    name: str = "sure"

    def draw(self, rng: random.Random) -> Problem:
        draft = Draft("Answer.")
        draft.add("question", "user", "What?")
        return draft.done(self.name, "No.", FirstSentence(draft.say("answer", "No."), "No."))

    def varied(self, rng: random.Random, hardness: float) -> Sure:
        return self


def test_a_split_that_a_task_cannot_draw_is_an_error_by_itself(make_engine: MakeEngine) -> None:
    split = Sure().draw(random.Random(0)).split
    missing = next(name for name in ("train", "dev", "test") if name != split)
    with pytest.raises(ValueError, match="is in the"):
        evaluate(make_engine(), [Sure()], count=2, split=missing)
    with pytest.raises(ValueError, match="must be at least 1"):
        evaluate(make_engine(), [Sure()], count=0)


def test_an_evaluation_reports_progress(make_engine: MakeEngine) -> None:
    heard: list[str] = []
    split = Sure().draw(random.Random(0)).split
    result = evaluate(make_engine(), [Sure()], count=5, split=split, sampling=SHORT, on_progress=heard.append)
    assert heard == ["sure"] * 5
    assert result.results["sure"].solved.count == 5 and result.results["sure"].parsable is None


async def test_the_first_error_ends_the_others() -> None:
    started: list[int] = []

    async def job(number: int) -> int:
        started.append(number)
        await asyncio.sleep(0)
        if number == 2:
            raise LookupError("two")
        return number

    with pytest.raises(LookupError, match="two"):
        await at_once([lambda number=number: job(number) for number in range(200)], 64)
    assert len(started) < 200


@pytest.mark.slow
def test_samples_differ_votes_count_and_the_same_seed_says_the_same(
    make_engine: MakeEngine, embedded: LoadedModel
) -> None:
    engine = make_engine(embedded, method="baseline")
    first, again = (sample_and_vote(engine, TASKS["arithmetic"], count=6, samples=4) for _ in range(2))
    assert first == again
    assert first.single.count == first.vote.count == first.gain.count == 6 and first.every.count == 24
    assert first.gain.gained - first.gain.lost == first.vote.right - first.single.right
    with pytest.raises(ValueError, match="several messages"):
        sample_and_vote(engine, TASKS["recall"], count=1)
    with pytest.raises(ValueError, match="not 0"):
        sample_and_vote(engine, TASKS["arithmetic"], count=0)


def test_a_report_has_every_view_and_is_plain_json(embedded: LoadedModel) -> None:
    report = measure(embedded, tasks=["two_questions", "arithmetic"], views=["ordinary", "serial", "parallel"], count=2)
    as_object = report.as_object()
    assert set(as_object["views"]) == {"ordinary", "serial", "parallel"}
    assert as_object["views"]["ordinary"]["two_questions"]["bar"] == 0.98
    assert as_object["views"]["serial"]["two_questions"]["bar"] is None
    assert as_object["arithmetic_sampled"]["samples"] == 8
    assert as_object["fingerprint"] == embedded.adapter.fingerprint


def test_what_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown task 'recal'"):
        require_tasks(["recal"])
    with pytest.raises(ValueError, match="unknown view 'sideways'"):
        require_views(["ordinary", "sideways"])
    assert require_views(["serial", " serial", "ordinary"]) == ["serial", "ordinary"]
    assert "debate_turn" not in require_tasks([]) and require_tasks(["debate_turn"]) == ["debate_turn"]
