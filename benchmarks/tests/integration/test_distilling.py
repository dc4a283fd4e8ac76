"""Distillation: the baseline's words under choreo's views, an adapter from them, and tables of what it gives back."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from choreo_bench.cases import CASES
from choreo_bench.distilling import traces as distilling
from choreo_bench.distilling.teaching import Amounts, DistillResult, teach
from choreo_bench.distilling.traces import (
    SALT,
    DistillConfig,
    FixedExamples,
    adapted,
    divided,
    sample_traces,
    sampled,
    score_played,
)
from choreo_bench.experiments import eval_tuned as tuned
from choreo_bench.experiments.eval_dilemma import TUNED as TUNED_DILEMMA
from choreo_bench.experiments.eval_dilemma import measure_dilemma
from choreo_bench.experiments.eval_tuned import DistillPlan, measure_tuned
from choreo_bench.experiments.eval_untuned import Trial
from choreo_bench.playing import draw_items, play_all
from conftest import MakeEngine
from support.tuning import KilledError
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from choreo_agents import RunOptions
from choreo_agents.engine import Engine
from choreo_agents.errors import ContextLengthError, InvalidRequestError, KVBudgetError, TrainingError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.models.adapter_files import WEIGHTS_FILE
from choreo_agents.models.loader import WEIGHTS
from choreo_agents.sampling import Sampling
from choreo_agents.training.forward import TraceForward
from choreo_agents.training.journal import Journal
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.trace import Trace, read_traces
from choreo_agents.training.tuned import TUNED, Tuned
from choreo_agents.workflows.cases import Result
from choreo_agents.workflows.phrasing import load_prompts
from choreo_agents.workflows.playing import Setup, play, run_graph

SAMPLING = Sampling(temperature=0.7, top_p=0.95, max_tokens=40)
FACTS = {"facts": 3}


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is killed here is no machine."""
    monkeypatch.setattr("os.fsync", lambda _: None)


def setup_of(case: str, **changes: Any) -> Setup:
    found = CASES[case]
    return Setup(found, found.options.model_validate(changes), load_prompts(case, "embedded"), SAMPLING)


def lesson_of(case: str = "multi_qa", variant: str = "parallel", **changes: Any) -> DistillConfig:
    return DistillConfig(setup_of(case, **(changes or (FACTS if case == "multi_qa" else {}))), variant)


def recorded(model: LoadedModel, lesson: DistillConfig, folder: Path, count: int = 3, **options: Any) -> list[Trace]:
    items = lesson.items("train", count)
    with Journal(folder / "traces.jsonl", {}) as journal:
        sample_traces(model, lesson, items, journal, **options)
    known = {trace.id: trace for trace in read_traces(folder / "traces.jsonl")}
    return [known[item.id] for item in items]


def learnt(trace: Trace) -> list[tuple[int, ...]]:
    return [m.tokens[m.learn[0] : m.learn[1]] for m in trace.messages if m.learn is not None]


SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "multi_qa": ("parallel", FACTS),
    "branch_solve_merge": ("parallel", {"branches": 2, "size": 1}),
    "debate": ("choreo", {"agents": 2, "rounds": 2}),
    "tree_of_thoughts": ("choreo", {"steps": 2, "branches": 2, "voters": 2}),
    "prisoners_dilemma": ("choreo", {"talks": 1}),
}


@pytest.mark.parametrize("case", SMALL)
def test_a_trace_has_the_baselines_words_under_choreos_views(
    embedded: LoadedModel, make_engine: MakeEngine, tmp_path: Path, case: str
) -> None:
    variant, changes = SMALL[case]
    lesson = lesson_of(case, variant, **changes)
    [item] = lesson.items("train", 1)
    [trace] = recorded(embedded, lesson, tmp_path, 1)
    setup = replace(lesson.setup, sampling=SAMPLING.model_copy(update={"temperature": 1.0, "top_p": 1.0}))
    setup = setup.changed(lesson.served)

    teacher = make_engine(embedded, method="baseline", kv_budget_bytes=1 << 26)
    made = setup.case.play(item, setup.options, setup.prompts, setup.sampling)
    state, _ = asyncio.run(run_graph(teacher, made.graph, made.messages, seed=0))
    words = sampled(teacher, state)
    # Two branches that say the same in the same place have made one message.
    assert set(words.values()) == set(learnt(trace)), "other words than the baseline's"

    seen: dict[Any, list[torch.Tensor]] = {}

    def watch(*place: Any) -> Any:
        return lambda logits: seen.setdefault(place, []).append(logits.clone())

    student = make_engine(embedded, kv_budget_bytes=1 << 26, salt=SALT)
    made = setup.case.play(item, setup.options, setup.prompts, setup.sampling)
    app = made.graph.compile(engine=student)
    config: Any = {"configurable": {"choreo": RunOptions(seed=0, replay=words, logits_callback=watch)}}
    state = asyncio.run(app.ainvoke({"messages": list(made.messages)}, config))
    with torch.no_grad():
        packed = TraceForward(embedded).logits([trace]).logits
    at = 0
    places = {
        MessageHandle.model_validate(e["handle"]).id: (e["author"], e["superstep"], e["branch"], e["call"])
        for e in state["handles"]
    }
    for message in trace.messages:
        if message.learn is not None:
            count = message.learn[1] - message.learn[0]
            wanted = torch.stack(seen[places[message.name]])
            assert (packed[at : at + count] - wanted).abs().max() <= 1e-3
            at += count
    assert at == len(packed) and seen.keys() == words.keys()


def test_a_recording_that_is_killed_goes_on(
    embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distilling, "CHUNK", 2)
    lesson = lesson_of()
    whole = recorded(embedded, lesson, tmp_path / "whole", 6)
    assert [trace.id for trace in whole] == [f"train {n}" for n in range(6)]

    def kill(done: int) -> None:
        if done in (2, 5):
            raise KilledError

    heard: list[int] = []
    with pytest.raises(KilledError):
        recorded(embedded, lesson, tmp_path / "killed", 6, on_progress=kill)
    assert recorded(embedded, lesson, tmp_path / "killed", 6, on_progress=heard.append) == whole
    assert heard == [2, 4, 6], "what was there is not sampled again"
    assert recorded(embedded, lesson, tmp_path / "killed", 6, on_progress=heard.append) == whole and heard[3:] == [6]


def test_temperature_and_seed_decide_the_words(embedded: LoadedModel, tmp_path: Path) -> None:
    lesson = lesson_of()
    cold = recorded(embedded, lesson, tmp_path / "cold", temperature=0.0)
    assert recorded(embedded, lesson, tmp_path / "other", temperature=0.0, seed=9) == cold
    hot = recorded(embedded, lesson, tmp_path / "hot", temperature=2.0)
    assert hot != cold and recorded(embedded, lesson, tmp_path / "again", temperature=2.0) == hot
    assert recorded(embedded, lesson, tmp_path / "seed", temperature=2.0, seed=9) != hot


def test_variants_place_the_same_words_otherwise(embedded: LoadedModel, tmp_path: Path) -> None:
    serial, parallel = (
        recorded(embedded, lesson_of("multi_qa", variant, **FACTS), tmp_path / variant, 1)[0]
        for variant in ("serial", "parallel")
    )
    assert learnt(serial)[0] == learnt(parallel)[0]
    assert [m.offsets for m in serial.messages] != [m.offsets for m in parallel.messages]
    for variant in ("baseline", "spiral"):
        with pytest.raises(InvalidRequestError, match=f"no variant '{variant}' that reads caches: use .*parallel"):
            lesson_of("multi_qa", variant, **FACTS).served  # noqa: B018


@pytest.mark.parametrize("source", ["iterative_debate", "tree_of_thoughts", "debate"])
def test_a_single_call_is_taught_what_a_workflow_ends_with(
    embedded: LoadedModel, make_engine: MakeEngine, tmp_path: Path, source: str
) -> None:
    options = {"task": "notes"} if source == "debate" else {"steps": 2}
    own = {} if source == "debate" else {"steps": 2}
    lesson = replace(lesson_of("direct", "choreo", **options), source=setup_of(source, **own))
    [trace] = recorded(embedded, lesson, tmp_path, 1)
    [words] = learnt(trace)
    [item] = lesson.items("train", 1)
    hot = SAMPLING.model_copy(update={"temperature": 1.0, "top_p": 1.0})
    teacher = make_engine(embedded, method="baseline", kv_budget_bytes=1 << 26)
    assert lesson.source is not None
    result, _, _ = asyncio.run(play(teacher, replace(lesson.source, sampling=hot), item, seed=0))
    assert result.answer in embedded.decode(list(words), special=False)
    alone = recorded(embedded, replace(lesson, source=None), tmp_path / "alone", 1)[0]
    assert [m.tokens for m in alone.messages[:-1]] == [m.tokens for m in trace.messages[:-1]], "its own question"


def test_the_words_of_who_gave_the_majoritys_answer_are_taught(
    embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of whoever comes last; and nothing where nobody gives an answer."""
    wrong, right = (
        tuple(embedded.encode(f"Ann has {what} cups. I keep my answer.<|im_end|>")) for what in ("3 red", "5 blue")
    )
    spoken = {("Alice", 1): wrong, ("Alice", 3): right, ("Bruno", 3): right, ("Clara", 3): wrong}
    lesson = replace(lesson_of("direct", "choreo", task="notes"), source=setup_of("debate"))
    monkeypatch.setattr(
        distilling, "sampled", lambda *_: {(name, step, 0, 0): tokens for (name, step), tokens in spoken.items()}
    )
    for answer, taught in (("Ann has 5 blue cups.", right), ("Ann has 3 red cups.", wrong), ("", None)):
        monkeypatch.setattr(type(CASES["debate"]), "judge", lambda *_, answer=answer: Result(answer, 1.0))
        path = tmp_path / f"taught {answer}.jsonl"
        with Journal(path, {}) as journal:
            left_out = sample_traces(embedded, lesson, lesson.items("train", 1), journal)
        assert [learnt(trace) for trace in read_traces(path)] == ([] if taught is None else [[taught]])
        assert left_out == ({} if taught else {"train 0": "no agent has an answer to train on"})


def test_examples_are_the_adapters_with_the_ordinary_prompt_as_teacher(embedded: LoadedModel, tmp_path: Path) -> None:
    traces = recorded(embedded, lesson_of(), tmp_path, 2)
    taught, alone = FixedExamples(traces, taught=True), FixedExamples(traces)
    assert taught.digest == alone.digest and taught.epoch(0) is taught.epoch(5)
    for example, trace in zip(taught.epoch(0), traces, strict=True):
        assert {message.adapter for message in example.trace.messages} == {TUNED}
        assert example.teacher is not None and {m.adapter for m in example.teacher.messages} == {None}
        assert learnt(example.trace) == learnt(example.teacher) == learnt(trace)
        assert all(not message.parents for message in example.teacher.messages)
    assert all(example.teacher is None for example in alone.epoch(0))


class Silent:
    """Hears of everything and remembers the scores."""

    def __init__(self) -> None:
        self.scores: list[tuple[int, float, float | None]] = []
        self.sampled: list[tuple[str, int]] = []
        self.missing: list[tuple[str, str, str]] = []

    def sampling(self, split: str, done: int, wanted: int) -> None:
        self.sampled.append((split, done))

    def left_out(self, split: str, item: str, reason: str) -> None:
        self.missing.append((split, item, reason))

    def training(self, passage: Any) -> None: ...

    def judged(self, epoch: int, held: Any) -> None:
        self.scores.append((epoch, held.score, held.loss))


QUICK = TuneSettings(rank=8, learning_rate=5e-3, batch_tokens=512, epochs=4, patience=4)


def taught(
    model: LoadedModel, folder: Path, lesson: DistillConfig | None = None, **changes: Any
) -> tuple[DistillResult, Silent]:
    watcher = Silent()
    amounts = Amounts(traces=changes.pop("traces", 12), held_out=changes.pop("held_out", 6))
    found = teach(
        model,
        lesson or lesson_of(),
        QUICK.model_copy(update=changes),
        amounts,
        run=folder,
        out=folder / "adapter",
        watcher=watcher,
        command="choreo ...",
    )
    return found, watcher


def card_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "card.json").read_text())
    return found


@pytest.fixture(scope="module")
def adapter(embedded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[DistillResult, Silent, Path]:
    folder = tmp_path_factory.mktemp("taught")
    return (*taught(embedded, folder), folder)


def test_a_little_training_takes_the_surprise_away(adapter: tuple[DistillResult, Silent, Path]) -> None:
    found, watcher, folder = adapter
    first, best = found.outcome.untrained, found.outcome.best
    assert first.loss is not None and best.loss is not None
    assert best.loss < 0.7 * first.loss and best.score >= first.score
    assert [epoch for epoch, _, _ in watcher.scores] == list(range(found.outcome.epoch + 1))
    card = json.loads((folder / "adapter" / "card.json").read_text())
    assert card == found.card and card["best"]["loss"] == best.loss and card["variant"] == "parallel"
    assert card["traces"] == {"traces": 12, "held_out": 6, "temperature": 1.0, "seed": 0}
    assert not (folder / "run.lock").exists()


def test_what_caches_cost_is_the_distance_to_the_same_words_as_text(
    adapter: tuple[DistillResult, Silent, Path],
) -> None:
    """Against Hugging Face's own forward over the words of every view."""
    found, _, folder = adapter
    model, losses = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32), list[Tensor]()
    for trace in read_traces(folder / "dev-traces.jsonl"):
        for message in trace.messages:
            if message.learn is not None:
                before = [token for parent in message.parents for token in trace.by_name[parent].tokens]
                words = torch.tensor([*before, *message.tokens])
                start, end = (len(before) + place for place in message.learn)
                with torch.inference_mode():
                    logits = model(words[None]).logits[0].float()
                losses.append(cross_entropy(logits[start - 1 : end - 1], words[start:end], reduction="none"))
    assert found.as_text == pytest.approx(float(torch.cat(losses).mean()), abs=1e-5)
    first, best = found.outcome.untrained.loss, found.outcome.best
    assert first is not None and best.loss is not None
    assert found.as_text is not None and found.as_text < best.loss < first
    assert found.regained == pytest.approx((first - best.loss) / (first - found.as_text))
    assert found.card["as_text"] == found.as_text
    assert replace(found, as_text=first - 1e-4).regained is None, "nothing was lost"
    assert replace(found, as_text=None).regained is None, "no prompt of this workflow leads to the words"
    untrained, *trained = found.outcome.history
    history = [untrained | {"held_out_loss": best.loss - 1e-3}, *trained]
    worse = replace(found, outcome=replace(found.outcome, history=history), as_text=best.loss - 0.1)
    assert worse.regained is None, "the best score has not the best loss"


def test_what_is_judged_is_what_is_served(
    embedded: LoadedModel, adapter: tuple[DistillResult, Silent, Path], tmp_path: Path
) -> None:
    """The held-out loss and score of the card are those of the adapter that was written."""
    found, _, folder = adapter
    best = found.outcome.best
    dev = read_traces(folder / "dev-traces.jsonl")
    served = embedded.adapter.read_adapter(folder / "adapter")
    served.dropout = 0.5
    loss = TraceForward(embedded, adapters={TUNED: served}).mean_loss([adapted(trace) for trace in dev], 512)
    assert loss == pytest.approx(best.loss, abs=1e-6) and served.dropout == 0.5
    lesson = lesson_of()
    items = lesson.items("dev", 6)
    assert score_played(embedded, lesson, items, folder / "adapter") == best.score
    assert score_played(embedded, lesson, items, None) == found.outcome.untrained.score


def test_an_item_that_cannot_be_played_is_wrong_and_stops_nothing(
    embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_long(*_: Any, **__: Any) -> Any:
        raise ContextLengthError("too long")

    monkeypatch.setattr(distilling, "play", too_long)
    assert score_played(embedded, lesson_of(), lesson_of().items("dev", 2), None) == 0.0


def test_a_distillation_started_again_changes_nothing(
    embedded: LoadedModel, adapter: tuple[DistillResult, Silent, Path]
) -> None:
    found, _, folder = adapter
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    again, watcher = taught(embedded, folder)
    assert watcher.scores == [] and watcher.sampled == [("train", 12), ("dev", 6)]
    assert again.card == found.card and again.outcome == found.outcome
    after = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    assert {path for path in before if before[path] != after.get(path)} == set()


def test_more_traces_of_the_same_are_added_to_those_that_are_there(embedded: LoadedModel, tmp_path: Path) -> None:
    """A run that asks for fewer again learns from just these."""
    first, _ = taught(embedded, tmp_path, traces=2, held_out=2, epochs=1)
    (tmp_path / "checkpoint.pt").rename(tmp_path / "first")
    _, watcher = taught(embedded, tmp_path, traces=3, held_out=2, epochs=1)
    assert [done for split, done in watcher.sampled if split == "train"] == [2, 3]
    (tmp_path / "checkpoint.pt").rename(tmp_path / "second")
    again, watcher = taught(embedded, tmp_path, traces=2, held_out=2, epochs=1)
    assert [done for split, done in watcher.sampled if split == "train"] == [2]
    assert again.outcome.history == first.outcome.history


def test_a_distillation_goes_on_with_no_other_held_out_items(
    embedded: LoadedModel, adapter: tuple[DistillResult, Silent, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(adapter[2], folder)
    with pytest.raises(TrainingError, match="a run with other held-out data"):
        taught(embedded, folder, held_out=4)
    assert card_of(folder / "adapter")["traces"]["held_out"] == 6, "what is there is left"


def test_traces_of_another_temperature_are_refused(
    embedded: LoadedModel, adapter: tuple[DistillResult, Silent, Path]
) -> None:
    _, _, folder = adapter
    with pytest.raises(InvalidRequestError, match=r"temperature 1.0, not 0.5: pass another file"):
        teach(
            embedded, lesson_of(), QUICK, Amounts(12, 6, 0.5), run=folder, out=folder / "adapter",
            watcher=Silent(), command="",
        )  # fmt: skip


def played(model: LoadedModel, path: Path, folder: Path | None, variants: Sequence[str]) -> dict[str, Any]:
    setup = setup_of("multi_qa", **FACTS)
    items = draw_items(setup.case, setup.options, 4, "test", 0)
    with Journal(path, {}) as journal:
        play_all(model, setup, items, variants, journal, seeds=range(4), adapter=folder)
        return dict(journal.records)


def test_tuned_variants_are_played_with_their_adapter(
    embedded: LoadedModel, adapter: tuple[DistillResult, Silent, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, folder = adapter
    load, loaded = Engine.load, []

    def watched(model: Any, **options: Any) -> Engine:
        loaded.append((options["method"], options.get("adapter")))
        return load(model, **options)

    monkeypatch.setattr(Engine, "load", watched)
    names = ["baseline", "parallel", "parallel + tuned"]
    found = played(embedded, tmp_path / "one.jsonl", folder / "adapter", names)
    assert loaded == [("baseline", None), ("choreo", None), ("choreo", folder / "adapter")]
    tuned_, plain = ({k: r["messages"] for k, r in found.items() if r["variant"] == name} for name in names[:0:-1])
    assert list(tuned_.values()) != list(plain.values()), "the adapter changes what is said"
    assert played(embedded, tmp_path / "one.jsonl", folder / "adapter", names) == found and len(loaded) == 3


def test_a_journal_refuses_the_results_of_another_adapter(
    embedded: LoadedModel, adapter: tuple[DistillResult, Silent, Path], tmp_path: Path
) -> None:
    _, _, folder = adapter
    played(embedded, tmp_path / "one.jsonl", folder / "adapter", ["parallel + tuned"])
    Tuned(embedded, QUICK).save(tmp_path / "other")
    with pytest.raises(InvalidRequestError, match="or of another adapter: pass another file"):
        played(embedded, tmp_path / "one.jsonl", tmp_path / "other", ["parallel + tuned"])
    with pytest.raises(InvalidRequestError, match=r"'parallel \+ tuned' needs an adapter: pass its folder"):
        played(embedded, tmp_path / "two.jsonl", None, ["parallel", "parallel + tuned"])
    played(embedded, tmp_path / "one.jsonl", tmp_path / "other", ["parallel"])


@pytest.mark.parametrize("changed", [{"alpha": 64.0}, {"mapper_rank": 4}])
def test_a_journal_tells_adapters_of_the_same_weights(
    embedded: LoadedModel, tmp_path: Path, changed: dict[str, Any]
) -> None:
    before = QUICK.model_copy(update={"mapper_rank": 2})
    Tuned(embedded, before).save(tmp_path / "adapter")
    played(embedded, tmp_path / "one.jsonl", tmp_path / "adapter", ["parallel + tuned"])
    weights = (tmp_path / "adapter" / WEIGHTS_FILE).read_bytes()
    Tuned(embedded, before.model_copy(update=changed)).save(tmp_path / "adapter")
    assert (tmp_path / "adapter" / WEIGHTS_FILE).read_bytes() == weights
    with pytest.raises(InvalidRequestError, match="or of another adapter: pass another file"):
        played(embedded, tmp_path / "one.jsonl", tmp_path / "adapter", ["parallel + tuned"])


def test_a_mapper_alone_is_played(embedded: LoadedModel, tmp_path: Path) -> None:
    Tuned(embedded, QUICK.model_copy(update={"rank": 0, "mapper_rank": 2})).save(tmp_path / "mapper")
    assert played(embedded, tmp_path / "one.jsonl", tmp_path / "mapper", ["parallel + tuned"])


def test_the_dilemma_is_played_once_more_with_an_adapter(embedded: LoadedModel, tmp_path: Path) -> None:
    Tuned(embedded, QUICK).save(tmp_path / "zero")
    told: list[str] = []
    variants: Any = ("baseline", "choreo")
    report = measure_dilemma(
        embedded, games=2, alices=("defect",), variants=variants, adapter=tmp_path / "zero", on_progress=told.append
    )
    cooperated = report.cooperated["defect"]
    assert set(cooperated) == {"baseline", "choreo", TUNED_DILEMMA} and len(told) == 6
    assert cooperated[TUNED_DILEMMA] == cooperated["choreo"], "an adapter of zeros changes nothing"
    assert report.difference("defect", TUNED_DILEMMA).count == 2


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small courses and two trials."""
    courses = (
        DistillPlan("multi_qa-parallel", "multi_qa", "parallel", (("facts", 3),), 3, 1, 3),
        DistillPlan(
            "prisoners_dilemma", "prisoners_dilemma", "choreo", (("every_strategy", True), ("talks", 1)), 3, 1, 3
        ),
    )
    monkeypatch.setattr(tuned, "COURSES", {course.name: course for course in courses})
    trial = Trial("MultiQA", 1, "multi_qa", ("baseline", "parallel", "parallel + tuned"), {"facts": 3})
    monkeypatch.setattr(tuned, "TRIALS", (trial,))
    monkeypatch.setattr(tuned, "SETTINGS", QUICK)


def test_workflows_bring_the_single_calls_that_they_are_set_against() -> None:
    assert [trial.name for trial in tuned.trials_of({"debate", "multi_qa"})] == ["MultiQA", "Direct (notes)", "MADpar"]
    assert tuned.trials_of(None) == tuned.TRIALS and tuned.trials_of({"prisoners_dilemma"}) == ()


@pytest.mark.slow
def test_tables_started_again_are_the_same_and_cost_nothing(
    embedded: LoadedModel, tables: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    games: list[str] = []

    def measure(**options: Any) -> Any:
        return measure_tuned(
            embedded, count=2, folder=tmp_path, watcher=lambda name: Silent(), on_game=games.append, **options
        )

    first = measure(command="one")
    assert len(games) == 3 * 3 * 2 and set(first.cards) == {"multi_qa-parallel", "prisoners_dilemma"}
    [line] = [each for each in first.played.lines(1) if each.outcome.name == "parallel + tuned"]
    assert line.outcome.items == 2
    report = tmp_path / "played" / "dilemma.json"
    whole = report.read_text()
    for spoilt in (
        "{}",
        "[]",
        "",
        whole.replace('"games": 2, "seed"', '"players": 2, "seed"').replace('wanted": {"players', 'wanted": {"games'),
    ):
        report.write_text(spoilt)
        with pytest.raises(InvalidRequestError, match=r"dilemma.json' is not a file of results: remove it"):
            measure(command="two")
    report.write_text(whole)
    again = measure(command="two")
    assert len(games) == 18, "the dilemma is not played again"
    assert again.cards == first.cards and again.dilemma == first.dilemma


class Quiet:
    """Hears of a distillation, and says nothing."""

    def sampling(self, *_: object) -> None: ...

    def left_out(self, *_: object) -> None: ...

    def training(self, *_: object) -> None: ...

    def judged(self, *_: object) -> None: ...


def test_items_of_ones_own_teach_and_judge(embedded: LoadedModel, tmp_path: Path) -> None:
    lesson = lesson_of()
    items = [item.model_copy(update={"id": f"own {n}"}) for n, item in enumerate(lesson.items("train", 5))]
    unknown = items[-1].model_copy(update={"answers": ()})
    own = replace(lesson, own=divided([*items[:-1], unknown], 2))
    assert own.own is not None and [len(own.own[split]) for split in ("train", "dev")] == [4, 1]
    settings = TuneSettings(rank=2, epochs=1, learning_rate=5e-3)
    where: dict[str, Any] = {"run": tmp_path, "out": tmp_path / "out", "watcher": Quiet(), "command": ""}
    taught = teach(embedded, own, settings, Amounts(traces=9, held_out=9), **where)
    traces = read_traces(tmp_path / "train-traces.jsonl")
    assert [trace.id for trace in traces] == [item.id for item in items[:4]]
    assert taught.card["traces"]["traces"] == 4 and taught.card["traces"]["held_out"] == 1, "not what was asked for"
    assert not taught.graded, "nobody knows what is right for the one that judges"
    untrained = taught.outcome.untrained
    assert untrained.loss is not None and untrained.score == -untrained.loss
    changed = replace(own, own=divided(items, 2))
    with pytest.raises(InvalidRequestError, match="results of another run, with items"):
        teach(embedded, changed, settings, Amounts(traces=9, held_out=9), **where)
    with pytest.raises(InvalidRequestError, match="pass at least two"):
        divided(items[:1], 2)


def test_an_item_that_is_too_long_is_left_out_and_named(
    embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson = lesson_of("direct", "choreo", steps=2)
    items = [item.model_copy(update={"id": f"line {n}"}) for n, item in enumerate(lesson.items("train", 5), start=1)]
    longest = " ".join(["Add 1."] * 900)
    items[1] = items[1].model_copy(update={"question": longest})
    settings = TuneSettings(rank=2, epochs=1, learning_rate=5e-3)
    for _ in range(2):
        watcher = Silent()
        teach(
            embedded, replace(lesson, own=divided(items, 1)), settings, Amounts(traces=9, held_out=9),
            run=tmp_path, out=tmp_path / "out", watcher=watcher, command="",
        )  # fmt: skip
        [(split, item, reason)] = watcher.missing
        assert (split, item) == ("train", "line 2") and "context" in reason
    assert [trace.id for trace in read_traces(tmp_path / "train-traces.jsonl")] == ["line 1", "line 3", "line 4"]
    assert card_of(tmp_path / "out")["traces"]["traces"] == 3

    items[-1] = items[-1].model_copy(update={"question": longest})
    with pytest.raises(InvalidRequestError, match=r"none of the 1 dev items can be used: 'line 5', say: .*context"):
        teach(
            embedded, replace(lesson, own=divided(items, 1)), settings, Amounts(traces=9, held_out=9),
            run=tmp_path / "other", out=tmp_path / "out", watcher=Silent(), command="",
        )  # fmt: skip

    async def no_memory(*_: object) -> Any:
        raise KVBudgetError("too little memory")

    monkeypatch.setattr(distilling, "_trace", no_memory)
    with pytest.raises(KVBudgetError), Journal(tmp_path / "small.jsonl", {}) as journal:
        sample_traces(embedded, lesson, lesson.items("train", 1), journal)


def test_what_another_workflow_teaches_is_not_mixed_with_what_a_third_does(
    embedded: LoadedModel, tmp_path: Path
) -> None:
    settings = TuneSettings(rank=2, epochs=1, learning_rate=5e-3)
    sources = [setup_of("iterative_debate", steps=2, rounds=rounds) for rounds in (1, 2)]
    lessons = [replace(lesson_of("direct", "choreo", steps=2), source=source) for source in sources]
    where: dict[str, Any] = {"run": tmp_path, "out": tmp_path / "out", "watcher": Quiet(), "command": ""}
    for _ in range(2):
        teach(embedded, lessons[0], settings, Amounts(traces=2, held_out=1), **where)
    source = card_of(tmp_path / "out")["source"]
    assert source["workflow"] == "iterative_debate" and source["options"]["rounds"] == 1
    for other in (lessons[1], replace(lessons[0], source=None)):
        with pytest.raises(InvalidRequestError, match="results of another run, with source"):
            teach(embedded, other, settings, Amounts(traces=2, held_out=1), **where)
