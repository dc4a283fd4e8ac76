"""`choreo eval synthesis`: contenders, sweeps, orders, tables; nothing is asked or trained twice."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support.commands import choreo
from choreo_bench.evaluation.synthesis import evaluate_synthesis
from choreo_bench.experiments.eval_synthesis import measure
from choreo_bench.experiments.eval_synthesis.measure import (
    CONTENDERS,
    SWEPT,
    TEMPERATURES,
    AskedTask,
    Contender,
    ContenderTraining,
    Evaluator,
    Shuffled,
    by_branches,
    by_length,
    by_order,
    changed,
    contenders_named,
    courses,
    tempered,
)
from choreo_bench.experiments.eval_synthesis.report import (
    MergeReport,
    ablation_table,
    order_table,
    sweep_table,
    verdict_table,
    verdicts,
)
from choreo_bench.harness import Display
from choreo_bench.language import draw_problem
from choreo_bench.language.synthesis import SYNTHESIS_TASKS, Parts
from choreo_bench.synthesizers import curriculum as curricula
from choreo_bench.synthesizers.curriculum import DrawnCurriculum
from conftest import MakeEngine
from rich.console import Console

from choreo_agents.errors import InvalidRequestError, TrainingError
from choreo_agents.models import LoadedModel
from choreo_agents.training import synthesizer
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.tuning import Tuning

TINY = ContenderTraining(
    TuneSettings(rank=4, mapper_rank=4, epochs=1, batch_tokens=512),
    DrawnCurriculum(layouts=("sequential",), weights={"tasks": 1.0}, examples=4, judged=1, hardness=0.2, ramp=1),
)
FEW = {name: SYNTHESIS_TASKS[name].with_branches(2) for name in ("vote", "best")}
ASKED = [AskedTask(name, task) for name, task in FEW.items()]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tiny course for every kind, and few tasks to be judged by."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr(measure, "courses", lambda seed: dict.fromkeys(courses(seed), TINY))
    monkeypatch.setattr(measure, "CALIBRATED_ON", 1)
    monkeypatch.setattr(curricula, "LEARNT_TASKS", FEW)


def refereed(model: LoadedModel, folder: Path, who: Sequence[Contender], **options: Any) -> dict[tuple[str, str], Any]:
    with Evaluator(model, folder) as referee:
        referee.prepare(who, Display(Console(quiet=True)))
        return referee.play(who, ASKED, 2, **options)


@pytest.mark.slow
def test_a_referee_trains_and_asks_once(embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who = [one for one in CONTENDERS if one.layout != "parallel"]
    told: list[tuple[str, int]] = []
    first = refereed(embedded, tmp_path, who, on_progress=lambda name, more: told.append((name, more)))
    assert set(first) == {(one.name, name) for one in who for name in FEW}
    assert all(len(scores) == 2 and set(scores) <= {0.0, 1.0} for scores in first.values())
    assert told.count(("text", 1)) == 4
    for name in ("full-sequential", "no-mapper-sequential", "no-adapter-sequential", "native"):
        assert (tmp_path / name / "synthesizer" / "card.json").exists()
    monkeypatch.setattr(Tuning, "_step", None)
    monkeypatch.setattr(measure, "evaluate_synthesis", None)
    again = refereed(embedded, tmp_path, who, on_progress=lambda name, more: told.append((name, more)))
    assert again == first and told.count(("text", 2)) == 2


def test_a_referee_that_is_killed_goes_on(
    embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def watched(engine: Any, tasks: Any, **options: Any) -> Any:
        asked.append(tasks[0].name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return evaluate_synthesis(engine, tasks, **options)

    monkeypatch.setattr(measure, "evaluate_synthesis", watched)
    with pytest.raises(KeyboardInterrupt):
        refereed(embedded, tmp_path, SWEPT[:1])
    found = refereed(embedded, tmp_path, SWEPT[:1])
    assert asked == ["vote", "best", "best"] and len(found) == 2


def test_what_is_trained_needs_no_checkpoints(
    embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = [Contender("native", "native")]
    first = refereed(embedded, tmp_path, who)
    (tmp_path / "native" / "checkpoint.pt").unlink()
    card = tmp_path / "native" / "synthesizer" / "card.json"

    def train(*_: Any, **options: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(measure, "train_synthesizer", train)
    assert refereed(embedded, tmp_path, who) == first
    for longer in ("settings", "curriculum"):
        other = replace(
            TINY,
            **{longer: replace(TINY.curriculum, examples=5)}
            if longer == "curriculum"
            else {longer: TINY.settings.model_copy(update={"epochs": 2})},
        )
        monkeypatch.setattr(measure, "courses", lambda seed, other=other: {"native": other})
        with pytest.raises(AssertionError, match="trained again"):
            refereed(embedded, tmp_path, who)
    monkeypatch.setattr(measure, "courses", lambda seed: {"native": TINY})
    with monkeypatch.context() as other, pytest.raises(AssertionError, match="trained again"):
        other.setattr(curricula, "QUESTIONS", 1)
        refereed(embedded, tmp_path, who)
    for spoilt in ("", "[]", card.read_text().replace(embedded.adapter.weights, "another")):
        card.write_text(spoilt)
        with pytest.raises(AssertionError, match="trained again"):
            refereed(embedded, tmp_path, who)


def test_results_of_another_training_are_refused(
    embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = [Contender("full", "sequential")]
    refereed(embedded, tmp_path, who)
    other = replace(TINY, settings=TINY.settings.model_copy(update={"rank": 2}))
    monkeypatch.setattr(measure, "courses", lambda seed: dict.fromkeys(courses(seed), other))
    with pytest.raises(TrainingError, match="written by a run with other settings"):
        refereed(embedded, tmp_path, who)
    shutil.rmtree(tmp_path / "full-sequential")
    with pytest.raises(InvalidRequestError, match="results of another training of 'full': pass another folder"):
        refereed(embedded, tmp_path, who)
    lines = (tmp_path / "played.jsonl").read_text().replace('"training": ', '"unknown": ')
    (tmp_path / "played.jsonl").write_text(lines)
    refereed(embedded, tmp_path, who)


def test_the_best_temperature_on_development_problems_is_taken(
    embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Evaluator(embedded, tmp_path) as referee:
        for temperature in TEMPERATURES:
            score = 0.5 if temperature in (0.9, 1.1) else 0.1
            referee.journal.add(f"calibration parallel {temperature:g}", {"score": score})
        loaded: list[Path] = []
        load = measure.Engine.load_adapter
        monkeypatch.setattr(
            measure.Engine, "load_adapter", lambda self, path: (loaded.append(path), load(self, path))[1]
        )
        referee.play([Contender("calibrated", "parallel")], ASKED[:1], 1)
    assert loaded == [tmp_path / "calibrated" / "0.9"]


def test_a_temperature_of_one_changes_nothing_and_another_does(embedded: LoadedModel) -> None:
    adapter = embedded.adapter
    keys = torch.randn(adapter.geometry.kv_heads, 5, adapter.geometry.head_dim)
    for temperature in (1.0, 0.8):
        mapper = tempered(adapter.geometry, adapter.kinds, temperature)
        mapped, values = mapper.map(1, keys, keys, torch.arange(5))
        torch.testing.assert_close(mapped, keys / temperature)
        assert torch.equal(values, keys)


@pytest.mark.parametrize("name", sorted(SYNTHESIS_TASKS))
def test_another_order_is_the_same_problem_told_otherwise(name: str) -> None:
    task = SYNTHESIS_TASKS[name].with_branches(4)
    moved = 0
    for number in range(8):
        plain = draw_problem(task, "test", number)
        other = draw_problem(Shuffled(task, 1), "test", number)
        assert draw_problem(Shuffled(task, 1), "test", number) == other
        assert sorted(other.branches) == sorted(plain.branches) and other.gold == plain.gold
        assert other.score({Parts.of(plain).answer.name: Parts.of(plain).answer.text}) == 1.0
        one, two = Parts.of(plain), Parts.of(other)
        assert {b.words.name: b for b in one.branches} == {b.words.name: b for b in two.branches}
        assert one.trunk == two.trunk and [ask.text for ask in one.asks] == [ask.text for ask in two.asks]
        assert [b.words.name for b in two.branches] == list(other.branches)
        moved += other.branches != plain.branches
    assert moved >= 4


def test_problems_of_one_answer_are_told_in_orders_of_their_own() -> None:
    task = SYNTHESIS_TASKS["candidates"].with_branches(4)
    orders: dict[str, set[tuple[int, ...]]] = {}
    for number in range(20):
        plain, told = (draw_problem(each, "test", number) for each in (task, Shuffled(task, 1)))
        orders.setdefault(told.gold, set()).add(tuple(plain.branches.index(branch) for branch in told.branches))
    assert any(len(of) > 1 for of in orders.values())


@pytest.mark.slow
def test_side_by_side_the_order_of_branches_changes_no_answer(embedded: LoadedModel, make_engine: MakeEngine) -> None:
    """They stand at one offset, and attention knows no other order."""

    def answers(task: Any, layout: Any) -> list[str]:
        engine = make_engine(embedded, kv_budget_bytes=1 << 26)
        return [record.answer for record in evaluate_synthesis(engine, [task], count=6, layout=layout)]

    for name in ("vote", "assembly", "sum"):
        task = SYNTHESIS_TASKS[name].with_branches(4)
        assert answers(task, "parallel") == answers(Shuffled(task, 1), "parallel")
    assert answers(task, "sequential") != answers(Shuffled(task, 1), "sequential"), "else it could not fail"


def test_sweeps_hold_what_their_names_say() -> None:
    for count, asked in by_branches().items():
        for one in asked:
            assert len(draw_problem(one.task, "test", 0).branches) == count and one.name.endswith(f" of {count}")
    shortest, longest = (
        sum(len(words.text) for one in asked for words in draw_problem(one.task, "test", 0).messages)
        for asked in (by_length()[1], by_length()[8])
    )
    assert 2 * shortest < longest
    every = [
        one.name for sweep in (by_branches(), by_length(), by_order()) for asked in sweep.values() for one in asked
    ]
    assert len(every) == len(set(every)), "names are keys"
    varied = Shuffled(SYNTHESIS_TASKS["vote"], 2).varied(random.Random(1), 1.0)
    assert varied.order == 2 and varied.name == "vote" and varied.with_branches(3).branches == 3


SCORES = {
    ("text", "vote"): [1.0, 1.0, 0.0, 1.0],
    ("full, parallel", "vote"): [1.0, 0.0, 0.0, 0.0],
    ("full, sequential", "vote"): [1.0, 1.0, 1.0, 1.0],
    ("text", "best"): [1.0, 1.0],
    ("full, parallel", "best"): [1.0, 0.0],
}


def test_verdicts_are_of_each_layout_problem_by_problem() -> None:
    one, two, three = verdicts(SCORES)
    assert (one.task, one.layout, one.share, one.met) == ("vote", "parallel", 0.25, False)
    assert (two.task, two.layout, two.share, two.met) == ("vote", "sequential", 1.0, True)
    assert two.difference.share == pytest.approx(0.25)
    assert (three.task, three.layout, three.met) == ("best", "parallel", False)
    lines = verdict_table(SCORES, "sequential").as_markdown().splitlines()
    assert lines[2].startswith("| vote | parallel | 25.0 | 75.0 | -50.0 (") and lines[2].endswith("| no |")
    assert lines[3].startswith("| vote | **sequential** | 100.0 | 75.0 | +25.0 (") and lines[3].endswith("| yes |")
    assert lines[4].startswith("| best | parallel | 50.0 | 100.0 | -50.0 (") and lines[4].endswith("| no |")
    assert "**" not in verdict_table(SCORES).as_markdown()
    assert verdicts({("text", "vote"): [1.0]}) == []


def test_development_problems_choose_the_layout(embedded: LoadedModel, tmp_path: Path) -> None:
    """Not those that contenders are set against text on."""
    both = [Contender("full", "parallel"), Contender("full", "sequential")]
    with Evaluator(embedded, tmp_path) as referee:
        for contender, best in zip(both, (0.5, 0.25), strict=True):
            assert referee.best_layout(both) is None, "one is not trained yet"
            card = referee._trained(contender.training) / "card.json"
            card.parent.mkdir(parents=True)
            card.write_text(json.dumps({"best": best}))
        assert referee.best_layout(both) == "parallel" and referee.best_layout(both[1:]) == "sequential"
        card.write_text("[]")
        assert referee.best_layout(both) is None and referee.best_layout([]) is None


def test_ablations_are_tasks_by_contenders_with_means() -> None:
    table = ablation_table(SCORES, [Contender("text"), Contender("full", "parallel")])
    head, rule, vote, best, means = table.as_markdown().splitlines()
    assert head == "| task | text | full, parallel |" and rule == "|---|--:|--:|"
    assert vote.startswith("| vote") and "75.0 (" in vote and "25.0 (" in vote and best.startswith("| best")
    assert means == "| **mean** | 87.5 | 37.5 |"


def test_sweeps_and_orders_as_lines() -> None:
    scores = {
        (who, f"{task} of {n}"): [1.0, 0.0] for who in ("text", "full, parallel") for task in "ab" for n in (2, 4)
    }
    table = sweep_table(scores, "branches", {2: ["a of 2", "b of 2"], 4: ["a of 4"], 8: ["a of 8"]})
    lines = table.as_markdown().splitlines()
    assert lines[2] == "| 2 | 50.0 | 50.0 |  | 4 |" and lines[3] == "| 4 | 50.0 | 50.0 |  | 2 |"
    assert lines[4].startswith("| 8 |  |  |  |")
    orders = {("text", "a"): [1.0, 0.0, 1.0], ("text", "a in order 1"): [1.0, 1.0, 1.0]}
    [*_, last] = order_table(orders, {0: ["a"], 1: ["a in order 1"]}).as_markdown().splitlines()
    assert last == "| text | 66.7, 100.0 | 33.3 |"
    assert changed([[1, 0], [1, 0]]) == 0 and changed([[1, 0], [0, 0], [1, 0]]) == 0.5


def test_sweeps_are_drawn(tmp_path: Path) -> None:
    scores = {("text", "a of 2"): [1.0], ("text", "a of 4"): [0.0], ("full, parallel", "a of 4"): [1.0]}
    names = {"branches": {2: ["a of 2"], 4: ["a of 4"]}, "length": {1: ["a of 2"]}}
    MergeReport("", [], {}, scores, names).figure().savefig(tmp_path / "sweeps.png")
    assert (tmp_path / "sweeps.png").read_bytes().startswith(b"\x89PNG")


def said(*arguments: str, code: int = 0) -> str:
    result = choreo("eval", "synthesis", *arguments, code=code)
    assert isinstance(result.exception, SystemExit | None)
    output: str = result.output
    return output


@pytest.mark.slow
def test_the_command_writes_tables_and_goes_on(
    embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("choreo_agents.models.load_model", lambda name, **options: embedded)
    monkeypatch.setattr(measure, "SYNTHESIS_TASKS", FEW)
    sweep = {2: ASKED[:1], 4: [AskedTask("vote of 4", FEW["vote"].with_branches(4))]}
    orders = {0: ASKED, 1: [AskedTask(f"{one.name} in order 1", Shuffled(one.task, 1)) for one in ASKED]}  # type: ignore[arg-type]
    for name, asked in (("by_branches", sweep), ("by_length", sweep), ("by_order", orders)):
        monkeypatch.setattr(measure, name, lambda asked=asked: asked)
    command = ["--n", "2", "--swept", "1", "--contenders", "text,untrained,full", "--out", str(tmp_path / "runs")]
    files = ["--report", str(tmp_path / "page.md"), "--plot", str(tmp_path / "page.png")]
    out = said(*command, *files)
    assert "solved, %; in brackets 95 % intervals" in out and "full, parallel" in out and "calibrated" not in out
    page = (tmp_path / "page.md").read_text()
    for title in (
        "What each part is worth",
        "Against text",
        "By branches",
        "By length",
        "By the order",
    ):
        assert f"## {title}" in page
    assert "in bold the layout whose training solved more development problems" in page
    assert page.count("| **parallel** |") + page.count("| **sequential** |") == len(FEW)
    assert page.startswith("`choreo eval synthesis --n 2 --swept 1 --contenders text,untrained,full ")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    whole = (tmp_path / "runs" / "played.jsonl").read_bytes()
    again = choreo("eval", "synthesis", *command, "--json")
    names = [one.name for one in CONTENDERS if one.kind in ("text", "untrained", "full")]
    found = json.loads(again.stdout)
    sweeps = found.pop("sweeps")
    assert set(found) == {f"{who} | {task}" for who in names for task in FEW}
    assert list(sweeps) == ["branches", "length", "order"]
    assert set(sweeps["branches"]) == {f"{one.name} | {task}" for one in SWEPT for task in ("vote", "vote of 4")}
    assert (tmp_path / "runs" / "played.jsonl").read_bytes() == whole, "nothing is asked twice"


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("text,native", ["text", "native"]),
        ("full", ["full, parallel", "full, sequential"]),
        ("no mapper:sequential, text", ["text", "no mapper, sequential"]),
        (None, [contender.name for contender in CONTENDERS]),
    ],
)
def test_contenders_are_named_with_all_layouts_or_one(asked: str | None, names: list[str]) -> None:
    assert [contender.name for contender in contenders_named(asked)] == names


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("--contenders", "text,magic"), "unknown contender 'magic': use some of calibrated, full", 1),
        (("--n", "0"), "Invalid value for '--n'", 2),
        (("--swept", "-1"), "Invalid value for '--swept'", 2),
        (("--model", "/nowhere"), "there is no folder '/nowhere'", 1),
        (("--swept", "0", "--plot", "x.png"), "--plot draws the sweeps, but there are none", 1),
        (("--out", "/proc/nowhere"), "No such file", 1),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], message: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in " ".join(said(*arguments, code=code).split())


def test_help_says_who_the_contenders_are() -> None:
    out = " ".join(said("--help").split())
    for kind in {one.kind for one in CONTENDERS}:
        assert kind in out
    assert "choreo eval synthesis --n 50" in out


def test_courses_differ_in_what_is_left_out_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = courses(3)
    assert {one.kind for one in CONTENDERS if not one.training} == {"text", "untrained", "calibrated"}
    assert {one.training for one in CONTENDERS if one.training} == set(named)
    full = named["full-parallel"]
    for one in CONTENDERS:
        if one.training:
            left_out = {"no mapper": {"mapper_rank": 0}, "no adapter": {"rank": 0}}.get(one.kind, {})
            assert named[one.training].settings == full.settings.model_copy(update=left_out)
            assert named[one.training].curriculum == replace(full.curriculum, layouts=(one.layout,))
    # As the command has them, but for how long they take.
    taken: list[Any] = []
    monkeypatch.setattr(synthesizer, "train_synthesizer", lambda model, *how, **_: taken.extend(how) or sys.exit(3))
    monkeypatch.chdir(tmp_path)
    choreo("train", "synthesizer", "--layouts", "parallel", "--seed", "3", code=3)
    settings, curriculum = taken
    longer = {name: getattr(full.settings, name) for name in ("epochs", "patience", "batch_tokens", "keep")}
    assert settings.model_copy(update=longer) == full.settings
    assert replace(curriculum, judged=full.curriculum.judged).as_object() == full.curriculum.as_object()
