"""Training a synthesizer: what it is shown, what little of it helps, and what it leaves alone."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest
import torch
from choreo_bench.evaluation.merging import play_synthesis
from choreo_bench.evaluation.synthesis import evaluate_synthesis
from choreo_bench.language import draw_problem
from choreo_bench.language.synthesis import HELD_OUT, SYNTHESIS_TASKS, Parts
from choreo_bench.synthesizers import curriculum as curricula
from choreo_bench.synthesizers.curriculum import DrawnCurriculum, DrawnExamples, held_out
from choreo_bench.synthesizers.examples import fan_of
from conftest import MakeEngine
from support.tuning import KilledError

from choreo_agents.engine import Engine, Memory, Scheduling
from choreo_agents.errors import AdapterError, InvalidRequestError, TrainingError
from choreo_agents.models import LoadedModel
from choreo_agents.runtime.step_trace import StepTrace
from choreo_agents.sampling import Sampling
from choreo_agents.synthesis.mapper import load_mapper
from choreo_agents.synthesis.placing import SYNTHESIS_LAYOUTS
from choreo_agents.training.checkpoints import reserved
from choreo_agents.training.forward import TraceForward
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.synthesis_traces import Views, cache_trace
from choreo_agents.training.synthesizer import train_synthesizer
from choreo_agents.training.tuned import TUNED, Tuned
from choreo_agents.training.tuning import TrainingProgress

GREEDY = Sampling(max_tokens=96)
SMALL = TuneSettings(
    rank=16, mapper_rank=None, learning_rate=5e-3, mapper_learning_rate=6e-3, epochs=1, batch_tokens=1024, dropout=0.0
)
ONCE = DrawnCurriculum(layouts=("parallel",), weights={"tasks": 1.0}, examples=64, judged=5, ramp=1, hardness=0.3)


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged by tasks that the model does not know beforehand where branches stand side by side."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr(curricula, "LEARNT_TASKS", {name: SYNTHESIS_TASKS[name] for name in ("hops", "assembly")})


class Trained(NamedTuple):
    out: Path
    outcome: TrainingProgress


def trained(model: LoadedModel, folder: Path, curriculum: DrawnCurriculum = ONCE, **options: Any) -> Trained:
    settings = options.pop("settings", SMALL)
    out = folder / "out"
    return Trained(out, train_synthesizer(model, settings, curriculum, run=folder, out=out, **options))


@pytest.fixture(scope="module")
def small(embedded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, list[Mapping[str, float]]]:
    scores: list[Mapping[str, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        few_tasks.__wrapped__(patch)  # type: ignore[attr-defined]
        found = trained(
            embedded, tmp_path_factory.mktemp("small"), on_score=lambda _, shares: scores.append(shares), command="it"
        )
    return found, scores


def test_a_very_small_training_solves_more(small: tuple[Trained, list[Mapping[str, float]]]) -> None:
    found, scores = small
    assert found.outcome.best.score > found.outcome.untrained.score and found.outcome.best_epoch == 1
    assert [mean(shares.values()) for shares in scores] == [found.outcome.untrained.score, found.outcome.best.score]
    assert set(scores[0]) == {"parallel hops", "parallel assembly"}
    card = json.loads((found.out / "card.json").read_text())
    assert (card["untrained"], card["best"], card["command"]) == (
        found.outcome.untrained.score,
        found.outcome.best.score,
        "it",
    )
    assert card["curriculum"]["layouts"] == ["parallel"] and card["curriculum"]["weights"] == {"tasks": 1.0}
    assert 0 < card["share_of_model"] < 0.2


def test_what_is_served_is_what_was_judged(embedded: LoadedModel, small: Any) -> None:
    found, scores = small
    assert held_out(embedded, found.out, ONCE) == scores[1]


def test_the_trainers_logits_are_those_of_play(embedded: LoadedModel, make_engine: MakeEngine, small: Any) -> None:
    """A whole problem: workers, mapped branches and the adapter, placed alike."""
    found, _ = small
    engine = make_engine(embedded, kv_budget_bytes=1 << 26)
    name = engine.load_adapter(found.out, TUNED)
    problem = draw_problem(SYNTHESIS_TASKS["hops"].with_branches(3), "dev", 3)
    seen: list[torch.Tensor] = []
    decode = engine.adecode

    async def watched(calls: Any) -> Any:
        return await decode(
            [replace(call, logits_callback=lambda logits: seen.append(logits.clone())) for call in calls]
        )

    engine.adecode = watched  # type: ignore[assignment, method-assign]
    merged = asyncio.run(play_synthesis(engine, problem, sampling=GREEDY, layout="parallel", adapter=name))
    trace = cache_trace(
        fan_of(embedded, problem, id="t", answer=merged.tokens), "parallel", Views(mapped=True, adapter=TUNED)
    )
    lora = embedded.adapter.read_adapter(found.out)
    mapper = load_mapper(found.out, embedded.adapter.geometry, embedded.adapter.kinds, embedded.adapter.weights)
    with torch.no_grad():
        packed = TraceForward(embedded, adapters={TUNED: lora}, mapper=mapper).logits([trace]).logits
    count = min(len(packed), len(seen))
    assert count > 3 and (packed[:count] - torch.stack(seen)[:count]).abs().max() <= 1e-3


@pytest.mark.parametrize("layout", SYNTHESIS_LAYOUTS)
def test_workers_are_bitwise_the_same_with_and_without_it(
    embedded: LoadedModel, small: Any, layout: Any, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    found, _ = small
    task = SYNTHESIS_TASKS["vote"].with_branches(3)
    problem = next(
        problem
        for problem in (draw_problem(task, "dev", number) for number in range(50))
        if all(branch.private for branch in Parts.of(problem).branches)
    )

    def run(adapter: Path | None, step_trace: StepTrace) -> tuple[dict[str, str], dict[int, list[torch.Tensor]]]:
        logits_by_seed.clear()
        with Engine.load(
            embedded, memory=Memory(kv_budget_bytes=1 << 26), scheduling=Scheduling(step_trace=step_trace)
        ) as engine:
            name = None if adapter is None else engine.load_adapter(adapter)
            play = play_synthesis(
                engine, problem, sampling=Sampling(max_tokens=20), layout=layout, workers="say", adapter=name
            )
            return asyncio.run(play).texts, {seed: list(logits) for seed, logits in logits_by_seed.items()}

    first = StepTrace()
    said, plain = run(None, first)
    said_too, beside = run(found.out, StepTrace(first.steps[: _before_answer(first)]))
    answer = list(problem.by_name).index(Parts.of(problem).answer.name)
    assert plain.keys() == beside.keys() and len(plain) == 4 and answer in plain
    for seed in plain:
        same = len(plain[seed]) == len(beside[seed]) and all(map(torch.equal, plain[seed], beside[seed]))
        assert same == (seed != answer)
    assert {name: words for name, words in said.items() if name in said_too and name != "answer"} == {
        name: words for name, words in said_too.items() if name != "answer"
    }


def _before_answer(step_trace: StepTrace) -> int:
    """Steps until the last that holds several calls: the workers' own."""
    return max(number for number, step in enumerate(step_trace.steps) if len(step) > 1) + 1


@pytest.mark.parametrize(("rank", "mapper_rank"), [(8, 0), (0, 8)], ids=["adapter", "mapper"])
def test_an_adapter_or_a_mapper_alone_is_trained_and_loads(
    embedded: LoadedModel, make_engine: MakeEngine, tmp_path: Path, rank: int, mapper_rank: int
) -> None:
    settings = SMALL.model_copy(update={"rank": rank, "mapper_rank": mapper_rank})
    found = trained(embedded, tmp_path, replace(ONCE, examples=8, judged=1), settings=settings)
    engine = make_engine(embedded, kv_budget_bytes=1 << 26)
    name = engine.load_adapter(found.out, "merge")
    assert engine.branches.maps(name) == bool(mapper_rank)
    [record] = evaluate_synthesis(engine, [SYNTHESIS_TASKS["best"]], count=1, layout="parallel", adapter=name)
    assert record.answer
    assert (found.out / "adapter_config.json").exists() == bool(rank)


def drawn(model: LoadedModel, curriculum: DrawnCurriculum, *, taught: bool = True, **changes: Any) -> DrawnExamples:
    changed = SMALL.model_copy(update={"imitation": float(taught), **changes})
    return DrawnExamples(curriculum, Tuned(model, changed))


MIXED = DrawnCurriculum(layouts=SYNTHESIS_LAYOUTS, examples=20, ramp=2, hardness=0.5)


def test_an_epoch_depends_on_seed_and_number_only(embedded: LoadedModel) -> None:
    source = drawn(embedded, MIXED)
    first, second = source.epoch(0), source.epoch(1)
    assert drawn(embedded, MIXED).epoch(1) == second, "a resumed run draws what it would have drawn"
    assert not {e.trace.id for e in first} & {e.trace.id for e in second}
    assert drawn(embedded, replace(MIXED, seed=1)).epoch(0) != first


def test_sources_have_their_shares_and_only_what_was_said_has_a_teacher(embedded: LoadedModel) -> None:
    def kind(name: str) -> str:
        return "dialogue" if name.startswith("dialogue") else "distilled" if name.endswith("distilled") else "tasks"

    for taught in (True, False):
        found = drawn(embedded, MIXED, taught=taught).epoch(0)
        kinds = Counter(kind(example.trace.id) for example in found)
        assert kinds == {"dialogue": 2, "tasks": 15, "distilled": 3}
        for example in found:
            assert (example.teacher is not None) == (taught and kind(example.trace.id) != "tasks")
            assert HELD_OUT not in example.trace.id
    order = [kind(example.trace.id) for example in found]
    assert order != sorted(order)


def test_layouts_and_parts_are_those_that_are_asked_for(embedded: LoadedModel) -> None:
    tasks = replace(MIXED, weights={"tasks": 1.0})
    mixed = drawn(embedded, tasks).epoch(0)
    by_layout = [drawn(embedded, replace(tasks, layouts=(layout,))).epoch(0) for layout in SYNTHESIS_LAYOUTS]
    every = {e.trace.id: [next(o for o in one if o.trace.id == e.trace.id) for one in by_layout] for e in mixed}
    found = Counter(place for e in mixed for place, other in enumerate(every[e.trace.id]) if other == e)
    assert set(found) == {0, 1, 2}
    for changes, mapped, adapter in (({}, True, TUNED), ({"rank": 0}, True, None), ({"mapper_rank": 0}, False, TUNED)):
        for example in drawn(embedded, tasks, **changes).epoch(0):
            assert any(m.mapped for m in example.trace.messages) == mapped
            assert {m.adapter for m in example.trace.messages} == {None, adapter}
    assert len({drawn(embedded, tasks, **c).digest for c in ({}, {"rank": 0}, {"mapper_rank": 0})}) == 3


def test_it_gets_harder(embedded: LoadedModel) -> None:
    tasks = DrawnCurriculum(weights={"tasks": 1.0}, examples=40, ramp=4)
    branches = [
        mean(sum(m.mapped for m in example.trace.messages) for example in drawn(embedded, tasks).epoch(number))
        for number in (0, 3)
    ]
    assert branches[0] < branches[1]


@pytest.mark.slow
def test_a_teacher_that_is_never_right_does_not_keep_it_waiting(tiny: LoadedModel, tmp_path: Path) -> None:
    """A model of random weights."""
    only = replace(MIXED, weights={"distilled": 1.0}, examples=2)
    assert drawn(tiny, only).epoch(0) == []
    with pytest.raises(TrainingError, match="epoch 1 has no example to learn from"):
        trained(tiny, tmp_path, replace(only, judged=1))


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_bits(embedded: LoadedModel, tmp_path: Path) -> None:
    few = DrawnCurriculum(layouts=("sequential",), examples=10, judged=1, ramp=1, hardness=0.2)
    settings = SMALL.model_copy(update={"epochs": 2, "dropout": 0.1, "imitation": 0.5, "batch_tokens": 512})
    whole = trained(embedded, tmp_path / "whole", few, settings=settings)

    def kill(passage: TrainingProgress) -> None:
        if (passage.epoch, passage.batch) == (1, 1):
            raise KilledError

    with pytest.raises(KilledError):
        trained(embedded, tmp_path / "killed", few, settings=settings, on_progress=kill)
    assert not (tmp_path / "killed" / "out").exists(), "what is not done is not served"
    again = trained(embedded, tmp_path / "killed", few, settings=settings)
    assert again.outcome.history == whole.outcome.history
    for name in ("adapter_model.safetensors", "mapper.safetensors"):
        assert (again.out / name).read_bytes() == (whole.out / name).read_bytes()


def test_another_curriculum_is_refused_and_so_is_a_folder_that_is_in_use(
    embedded: LoadedModel, small: Any, tmp_path: Path
) -> None:
    found, _ = small
    with pytest.raises(TrainingError, match="by a run with other data"):
        trained(embedded, found.out.parent, replace(ONCE, seed=5))
    with reserved(tmp_path), pytest.raises(InvalidRequestError, match="another run is using"):
        trained(embedded, tmp_path)
    with pytest.raises(AdapterError, match="rank must be from"):
        trained(embedded, tmp_path, settings=SMALL.model_copy(update={"mapper_rank": 9999}))
