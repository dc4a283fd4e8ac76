"""That a measurement measures what its labels say: views, splits, seeds, temperatures, and which row is which."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest
from bench_support.commands import choreo
from choreo_bench.evaluation import (
    Difference,
    Evaluation,
    Score,
    TaskResult,
    VoteResult,
    evaluate,
    sample_and_vote,
)
from choreo_bench.evaluation.play import play
from choreo_bench.experiments import eval_language as language
from choreo_bench.experiments.eval_language import LanguageReport, measure
from choreo_bench.language import TASKS, Problem, draw_problem
from choreo_bench.language.tasks import Arithmetic, ModeratedDebate, PrisonersDilemma, Recall
from choreo_bench.language.tasks.debate import DebateScorer
from conftest import MakeEngine

from choreo_agents.engine import Engine
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.playing import AT_ONCE, room

SHORT = Sampling(max_tokens=6)
PLAYING = import_module("choreo_bench.evaluation.evaluate")
Played = list[tuple[Problem, dict[str, Any]]]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Problems are answered by their golds instead of by a model; what they were played with is remembered."""
    heard: Played = []

    async def gold(engine: Engine, problem: Problem, **options: Any) -> Mapping[str, str]:
        heard.append((problem, options))
        return problem.gold_said()

    monkeypatch.setattr(PLAYING, "play", gold)
    return heard


def test_problems_are_those_of_the_seeds_and_the_split_and_are_played_as_asked(
    make_engine: MakeEngine, played: Played
) -> None:
    engine = make_engine()
    result = evaluate(engine, [TASKS["recall"]], count=3, seed=7, layout="parallel", sampling=SHORT)
    assert [problem for problem, _ in played] == [draw_problem(TASKS["recall"], "test", seed) for seed in (7, 8, 9)]
    assert [options for _, options in played] == [
        {"sampling": SHORT, "layout": "parallel", "seed": seed} for seed in (7, 8, 9)
    ]
    assert result.results["recall"].solved == Score(3, 3)
    evaluate(engine, [TASKS["recall"]], count=1, split="dev")
    assert played[-1][0] == draw_problem(TASKS["recall"], "dev", 0)


def test_only_problems_of_which_everything_is_right_count_as_solved(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def half(engine: Engine, problem: Problem, **_: Any) -> Mapping[str, str]:
        return problem.gold_said() | {"answer 1": "I forget."}

    monkeypatch.setattr(PLAYING, "play", half)
    result = evaluate(make_engine(), [Recall(questions=2)], count=2).results["recall"]
    assert (result.solved, result.share_right) == (Score(0, 2), 0.5)


def test_two_tasks_of_one_name_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="several tasks are named 'recall'"):
        evaluate(make_engine(), [Recall(facts=2), Recall(facts=3)], count=1)


def test_as_many_problems_are_played_at_once_as_memory_holds(make_engine: MakeEngine, embedded: LoadedModel) -> None:
    token = embedded.adapter.geometry.bytes_per_token
    assert room(make_engine(embedded, kv_budget_bytes=3 * 2048 * token)) == 3
    assert room(make_engine(embedded, kv_budget_bytes=100 * token)) == 1
    assert room(make_engine(embedded, kv_budget_bytes=1000 * 2048 * token)) == AT_ONCE


def test_a_small_memory_is_enough_for_many_problems(make_engine: MakeEngine, embedded: LoadedModel) -> None:
    engine = make_engine(embedded, kv_budget_bytes=2048 * embedded.adapter.geometry.bytes_per_token)
    assert (
        evaluate(engine, [TASKS["multi_document"]], count=4, sampling=SHORT).results["multi_document"].solved.count == 4
    )


async def test_each_message_samples_by_a_seed_of_its_own(make_engine: MakeEngine) -> None:
    engine, seeds = make_engine(), []
    decode = engine.adecode

    async def listening(*args: Any, sampling: Sampling, **options: Any) -> Any:
        seeds.append(sampling.seed)
        return await decode(*args, sampling=sampling, **options)

    engine.adecode = listening  # type: ignore[method-assign]
    problem = draw_problem(Recall(questions=2), "test", 0)
    for seed in (1, 2):
        await play(engine, problem, sampling=SHORT, seed=seed)
    assert len(set(seeds)) == 4


async def test_a_debate_ends_when_its_moderator_names_a_result(make_engine: MakeEngine) -> None:
    problem = draw_problem(ModeratedDebate(), "test", 0)
    assert len(problem.gold_said()) == 9
    one_round = {name: words for name, words in problem.gold_said().items() if name.endswith(" 1")}
    assert problem.stop is not None and problem.stop(one_round) and problem.score(one_round) == 1
    went_on = one_round | {"moderator 1": "Go on."}
    assert not problem.stop(went_on) and problem.score(went_on) == 0
    said = await play(make_engine(), problem, sampling=SHORT)
    assert 3 <= len(said) <= 9 and set(said) <= set(problem.gold_said())


@pytest.mark.parametrize(("method", "layout"), [("baseline", "parallel"), ("choreo", "diagonal")])
async def test_a_layout_that_an_engine_cannot_show_is_refused(
    make_engine: MakeEngine, method: Any, layout: Any
) -> None:
    with pytest.raises(ValueError, match=r"layout|offset"):
        await play(make_engine(method=method), draw_problem(TASKS["recall"], "test", 0), sampling=SHORT, layout=layout)


def test_samples_are_drawn_at_the_temperature_and_the_commonest_answer_is_elected(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[float, int]] = []

    async def mostly_right(engine: Engine, problem: Problem, *, sampling: Sampling, seed: int) -> Mapping[str, str]:
        drawn.append((sampling.temperature, seed))
        wrong = seed % 4 == 0
        return {"answer": "The result is 90." if wrong else f"So. {problem.gold}"}

    monkeypatch.setattr("choreo_bench.evaluation.voting.play", mostly_right)
    result = sample_and_vote(make_engine(), Arithmetic(), count=3, samples=4, temperature=0.6, seed=2)
    assert sorted(drawn) == [(0.6, seed) for seed in range(8, 20)]
    assert (result.single, result.every, result.vote) == (Score(0, 3), Score(9, 12), Score(3, 3))
    assert (result.gain.gained, result.gain.lost) == (3, 0)
    with pytest.raises(ValueError, match="not in one last sentence"):
        sample_and_vote(make_engine(), TASKS["two_questions"], count=1)


def test_views_differ_in_method_and_layout_only(embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, dict[str, Any]]] = []

    def listening(engine: Engine, tasks: Any, **options: Any) -> Evaluation:
        options.pop("on_progress")
        heard.append((engine.method, options))
        return Evaluation({task.name: TaskResult(Score(1, 1), 1.0, None) for task in tasks})

    monkeypatch.setattr(language, "evaluate", listening)
    measure(embedded, tasks=["recall"], views=["ordinary", "serial", "parallel"], count=4, split="dev", seed=9)
    same = {"count": 4, "split": "dev", "seed": 9}
    assert heard == [
        ("baseline", same | {"layout": "sequential"}),
        ("choreo", same | {"layout": "sequential"}),
        ("choreo", same | {"layout": "parallel"}),
    ]


def test_the_bars_are_those_that_were_set() -> None:
    wanted = {"recall": 0.98, "two_questions": 0.98, "three_questions": 0.98, "branch_solve_merge": 0.98}
    wanted |= {"majority_vote": 0.98, "best_supported": 0.98, "list_union": 0.98, "choose_by_value": 0.85}
    wanted |= dict.fromkeys(["sum_of_parts", "two_hop", "conflict", "diagnosis", "multi_document"], 0.95)
    assert wanted == language.BARS


def a_report() -> LanguageReport:
    tasks = {
        "recall": TaskResult(Score(99, 100), 0.995, None),
        "two_hop": TaskResult(Score(50, 100), 0.5, None),
        "debate": TaskResult(Score(80, 100), 0.8, Score(90, 100)),
    }
    vote = VoteResult(Score(60, 100), Score(470, 800), Score(90, 100), Difference(30, 0, 100))
    return LanguageReport("embedded", "f00d", "test", 100, 0, {"ordinary": tasks}, vote)


def test_tables_name_what_was_measured() -> None:
    rows = [
        line.strip("| ").split(" | ") for line in a_report().report().as_markdown("choreo").splitlines() if "|" in line
    ]
    found = {row[0]: row[1:] for row in rows}
    assert found["recall"] == ["0.990 (0.95-1.00)", "0.98 met"]
    assert found["two hop"] == ["0.500 (0.40-0.60)", "0.95 missed"]
    assert found["debate, readable"][0].startswith("0.900")
    assert found["one sample"][0].startswith("0.600") and found["vote over 8 samples"][0].startswith("0.900")
    assert found["gain"][0].startswith("+0.300")


def test_a_report_that_cannot_be_written_is_noticed_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(language, "measure", None)
    (tmp_path / "taken").write_text("")
    choreo("eval", "language", "--n", "1", "--report", str(tmp_path / "taken" / "page.md"), code=1)


def test_an_answer_that_one_of_several_leaves_open_cannot_be_read() -> None:
    problem = draw_problem(PrisonersDilemma(), "test", 0)
    said = problem.gold_said()
    assert problem.scorer.parsable(said)  # type: ignore[attr-defined]
    name = next(name for name in said if name.startswith("decision"))
    assert not problem.scorer.parsable(said | {name: "Perhaps."})  # type: ignore[attr-defined]
    scorer = DebateScorer(("a", "b"), "Ann has 3 red kites.")
    assert scorer.parsable({"a": "Ann has 3 red kites.", "b": "I do not know."})
    assert not scorer.parsable({"a": "Ann has 3 red kites.", "b": "Kites."})
