"""Training the embedded model: batches, checkpoints, resuming, and the command."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench_support.commands import choreo
from choreo_bench.embedded import pretrain, transcripts
from choreo_bench.embedded import recipe as recipes
from choreo_bench.embedded.card import QUICK_BAR, QUICK_TASK, save_model, score_model, weights_sha256, write_card
from choreo_bench.embedded.pretrain import (
    BucketProgress,
    Pretraining,
    as_batches,
    bucket_batches,
    first_choices,
)
from choreo_bench.embedded.recipe import QUICK, Phase, Shape, TrainingRecipe
from choreo_bench.embedded.transcripts import IGNORED, PRACTICE, WARM_UPS, rules
from choreo_bench.language import TASKS, draw_problem, vocabulary
from choreo_bench.language.tasks import DebateTurn
from choreo_bench.language.tasks.arithmetic import SLIP
from transformers import AutoModelForCausalLM

from choreo_agents.errors import TrainingError
from choreo_agents.training.checkpoints import write_checkpoint

SMALL = TrainingRecipe(
    shape=Shape(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, head_dim=16),
    warmup_steps=3,
    phases=(
        Phase(2, {"induction": 1.0}, batch_tokens=256, batches=3),
        Phase(3, {"recall": 1.0, "branch_solve_merge": 0.5}, batch_tokens=512, batches=2),
    ),
)


class KilledError(Exception):
    """Stands for a process that is gone."""


class Log:
    """A report that remembers, and kills the run after so many buckets."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.killed_at = killed_at
        self.heard: list[BucketProgress] = []
        self.shares: dict[int, Mapping[str, float]] = {}

    def advance(self, step: BucketProgress) -> None:
        self.heard.append(step)
        if step.bucket == self.killed_at:
            raise KilledError

    def scores(self, bucket: int, shares: Mapping[str, float]) -> None:
        self.shares[bucket] = shares


def trained(folder: Path, log: Log | None = None, recipe: TrainingRecipe = SMALL) -> Pretraining:
    run = Pretraining(recipe)
    log = log or Log()
    run.run(folder / "checkpoint.pt", log.advance, log.scores, score_every=4, checkpoint_every_s=0)
    return run


def same_weights(one: Pretraining, other: Pretraining) -> bool:
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("killed_at", [1, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 4))])
def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(tmp_path: Path, killed_at: int) -> None:
    whole = trained(tmp_path / "whole")
    with pytest.raises(KilledError):
        trained(tmp_path / "killed", Log(killed_at))
    log = Log()
    resumed = trained(tmp_path / "killed", log)
    # The kill came before the bucket's own checkpoint: that bucket is trained again.
    assert [step.bucket for step in log.heard] == list(range(killed_at, 6))
    assert same_weights(whole, resumed)
    assert (resumed.step, resumed.tokens) == (whole.step, whole.tokens)


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_weights(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone")
    run = Pretraining(SMALL)
    log = Log()
    run.run(tmp_path / "together.pt", log.advance, log.scores, processes=2, checkpoint_every_s=0)
    assert same_weights(alone, run) and (run.step, run.tokens) == (alone.step, alone.tokens)


@pytest.mark.slow
def test_another_seed_gives_other_weights_and_the_same_gives_the_same(tmp_path: Path) -> None:
    first = trained(tmp_path / "first")
    assert same_weights(first, trained(tmp_path / "again"))
    assert not same_weights(first, trained(tmp_path / "other", recipe=replace(SMALL, seed=1)))


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    trained(tmp_path)
    log = Log()
    trained(tmp_path, log)
    assert log.heard == []


def test_progress_is_told_and_scored(tmp_path: Path) -> None:
    log = Log()
    trained(tmp_path, log)
    assert [step.bucket for step in log.heard] == [1, 2, 3, 4, 5]
    assert log.heard[-1].buckets == SMALL.buckets == 5
    assert all(0 < step.loss < 10 and step.seconds > 0 for step in log.heard)
    assert [step.tokens for step in log.heard] == sorted({step.tokens for step in log.heard})
    assert set(log.shares) == {4, 5}, "asked for, and at the end"
    assert set(log.shares[4]) == {"recall", "branch_solve_merge"}


def test_there_is_one_checkpoint_and_another_recipes_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt"]
    with pytest.raises(TrainingError, match="other settings"):
        trained(tmp_path, recipe=replace(SMALL, clip_norm=2.0))


def test_a_damaged_checkpoint_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"half a file")
    with pytest.raises(TrainingError, match=r"checkpoint.pt.* cannot be read"):
        trained(tmp_path)


def test_a_checkpoint_that_was_being_written_is_not_resumed_from(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt.partial").write_bytes(b"half a file")
    assert same_weights(trained(tmp_path), trained(tmp_path / "other"))


def test_the_card_says_what_the_weights_are(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    save_model(run, tmp_path / "out")
    evaluation = score_model(tmp_path / "out", [TASKS["recall"], TASKS["arithmetic"]], count=3)
    card = json.loads(write_card(run, tmp_path / "out", evaluation).read_text())
    assert card["weights_sha256"] == weights_sha256(tmp_path / "out")
    assert card["tokens_seen"] == run.tokens > 0 and card["steps"] == run.step
    assert card["recipe"]["seed"] == 0 and card["recipe"]["phases"][0]["mix"] == {"induction": 1.0}
    assert set(card["test_accuracy"]) == {"recall", "arithmetic"}
    assert card["test_accuracy"]["recall"]["count"] == 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert card["parameters"] == sum(p.numel() for p in loaded.parameters())
    for name, weights in loaded.state_dict().items():
        assert torch.equal(weights, run.model.state_dict()[name])


def test_a_checkpoint_that_cannot_be_written_leaves_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path)
    (tmp_path / "checkpoint.pt.partial").write_bytes(b"left by a kill")
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.pt")}

    def full_disk(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("enforce fail at inline_container.cc\nno space left")

    with monkeypatch.context() as patch:
        patch.setattr("choreo_agents.training.checkpoints.torch.save", full_disk)
        with pytest.raises(OSError, match="cannot be written"):
            write_checkpoint(tmp_path / "checkpoint.pt", {})
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.pt")} == before
    write_checkpoint(tmp_path / "checkpoint.pt", {})
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("state", [[1], {"x": 1}, {"vocabulary": "another"}], ids=str)
def test_a_file_that_is_no_checkpoint_of_this_run_is_refused(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(TrainingError, match=r"cannot be read|another vocabulary"):
        trained(tmp_path)


def test_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KilledError):
        trained(tmp_path, Log(3))
    monkeypatch.setattr(vocabulary, "PEOPLE", vocabulary.PEOPLE[::-1])
    with pytest.raises(TrainingError, match="another vocabulary"):
        trained(tmp_path)


def test_time_and_settings_of_earlier_processes_are_counted(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        trained(tmp_path, Log(4))
    path = tmp_path / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["counts"]["seconds"], state["compiled"] = 1000.0, True
    torch.save(state, path)
    run = trained(tmp_path)
    assert 1000 < run.seconds < 1100 and run.compiled


def test_learning_rates_rise_then_fall_along_a_cosine_and_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = (Phase(10, {"induction": 1.0}), Phase(10, {"induction": 1.0}, rate=0.5))
    run = Pretraining(replace(SMALL, warmup_steps=100, phases=phases, last_learning_rate=0.0))

    def rates(step: int, bucket: int, done: float) -> list[float]:
        run.step, run.bucket = step, bucket
        run._set_rates(done)
        return [optimizer.param_groups[0]["lr"] for optimizer, _ in run._optimizers]

    assert rates(49, 0, 0.0) == pytest.approx([2e-3, 1.5e-3])
    assert rates(500, 0, 0.0) == pytest.approx([4e-3, 3e-3])
    assert rates(500, 9, 0.5) == pytest.approx([2e-3, 1.5e-3])
    assert rates(500, 10, 0.5) == pytest.approx([1e-3, 0.75e-3])
    assert rates(500, 19, 1.0) == pytest.approx([0.0, 0.0])


def test_gradients_are_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda ps, most: norms.append(most) or clip(ps, most))
    run = trained(tmp_path, recipe=replace(SMALL, clip_norm=0.25))
    assert norms == [0.25] * run.step


def test_only_problems_of_the_training_split_are_learnt_and_only_those_for_development_scored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learnt, scored = spied_splits(monkeypatch, transcripts), spied_splits(monkeypatch, pretrain)
    run = Pretraining(SMALL)
    bucket_batches(SMALL, run.tokenizer, 3)
    first_choices(run.model, run.tokenizer, SMALL)
    assert set(learnt) == {"train"} and set(scored) == {"dev"}


def spied_splits(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[str]:
    heard: list[str] = []
    monkeypatch.setattr(
        module, "draw_problem", lambda task, split, seed: heard.append(split) or draw_problem(task, split, seed)
    )
    return heard


def test_slips_are_taught_once_sums_are_known() -> None:
    for name in ("arithmetic", "moderated_debate"):
        varied = [TASKS[name].varied(random.Random(0), hardness) for hardness in (0.0, 0.99, 1.0)]
        assert [task.slip for task in varied] == [0.0, 0.0, SLIP]  # type: ignore[attr-defined]


def test_transcripts_vary_in_what_should_not_matter() -> None:
    problem = next(
        drawn
        for drawn in (draw_problem(DebateTurn(others=0, rounds=1), "train", seed) for seed in range(99))
        if "notes" in drawn.by_name
    )
    [transcript] = transcripts.transcripts(problem)
    plain = {turn.name for turn in transcript}
    orders, rules, named, renamed = set(), set(), set(), False
    for seed in range(200):
        turns = transcripts.varied(random.Random(seed), transcript)
        names = [turn.name for turn in turns]
        assert plain - {"rules"} <= set(names) <= plain and turns[-1].learn
        orders.add(names.index("notes") < names.index("question"))
        rules.add("rules" in names)
        author = turns[-1].author
        named.add(author is not None)
        renamed = renamed or bool(author and author not in vocabulary.AGENTS)
    assert orders == rules == named == {True, False} and renamed


def test_drills_are_right() -> None:
    rng = random.Random(0)
    for _ in range(200):
        results = transcripts.sums(rng)[-1].text
        for one, sign, other, made in re.findall(r"(\d+) (plus|minus|and) (\d+) (?:is|make) (\d+)\.", results):
            assert int(made) == int(one) + (-int(other) if sign == "minus" else int(other))
        for listed, answer in pairwise_turns(transcripts.orders(rng)):
            assert answer == ", ".join(sorted(set(listed.removesuffix(" in order?").split(", ")))) + "."
        for listed, answer in pairwise_turns(transcripts.largest(rng)):
            assert answer == f"{max(map(int, re.findall('[0-9]+', listed)))}."


def pairwise_turns(turns: list[transcripts.TranscriptTurn]) -> list[tuple[str, str]]:
    return [(asked.text, said.text) for asked, said in zip(turns[::2], turns[1::2], strict=True)]


def test_a_run_learns(tmp_path: Path) -> None:
    log = Log()
    recipe = replace(SMALL, step_batches=1, phases=(Phase(12, {"induction": 1.0}, batch_tokens=512, batches=6),))
    trained(tmp_path, log, recipe)
    assert log.heard[-1].loss < log.heard[0].loss - 0.5


def test_batches_hold_every_row_once_within_their_tokens() -> None:
    rows = [([7] * length, [8] * length) for length in (3, 50, 9, 9, 20, 200, 1)]
    batches = as_batches(rows, 64)
    assert sorted(int((ids == 7).sum()) for batch in batches for ids in batch.ids) == [1, 3, 9, 9, 20, 50, 200]
    for batch in batches:
        assert batch.ids.shape == batch.labels.shape
        assert batch.ids.numel() <= 64 or len(batch.ids) == 1
        assert ((batch.ids == 7) == (batch.labels == 8)).all(), "padding is not learnt"
    assert as_batches([], 64) == []


def test_a_bucket_is_drawn_alike_every_time_and_unlike_others() -> None:
    run = Pretraining(SMALL)
    first, again, other = (bucket_batches(SMALL, run.tokenizer, bucket) for bucket in (2, 2, 3))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
    assert not all(a.ids.shape == b.ids.shape and torch.equal(a.ids, b.ids) for a, b in zip(first, other, strict=False))
    assert all((batch.labels != IGNORED).any() for batch in first)


def test_the_mix_names_tasks_and_the_phases_follow_each_other() -> None:
    recipe = TrainingRecipe()
    for phase in recipe.phases:
        assert set(phase.mix) <= set(TASKS) | set(WARM_UPS) | set(PRACTICE)
    firsts = [sum(phase.buckets for phase in recipe.phases[:index]) for index in range(len(recipe.phases))]
    for first, phase in zip(firsts, recipe.phases, strict=True):
        assert recipe.phase(first) is recipe.phase(first + phase.buckets - 1) is phase
    with pytest.raises(IndexError, match=str(recipe.buckets)):
        recipe.phase(recipe.buckets)
    assert recipe.hardness(0) == 0.0 and recipe.hardness(recipe.buckets - 1) == 1.0


def test_learning_rates_fall_in_cycles() -> None:
    recipe = replace(SMALL, phases=(Phase(6, {"recall": 1.0}), Phase(4, {"recall": 1.0})), restarts=(6,))
    assert [recipe.done(bucket) for bucket in (0, 3, 6, 7, 9.5)] == [0.0, 0.5, 0.0, 0.25, 0.875]
    whole = replace(recipe, restarts=())
    assert [whole.done(bucket) for bucket in (0, 5, 9.5)] == [0.0, 0.5, 0.95]


def test_training_follows_the_cycles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a restart the rates jump up from their last share, and every restart of the recipe begins a phase."""
    rates: list[tuple[int, float]] = []
    set_rates = Pretraining._set_rates

    def recording(self: Pretraining, done: float) -> None:
        set_rates(self, done)
        rates.append((self.bucket, self._optimizers[0][0].param_groups[0]["lr"]))

    monkeypatch.setattr(Pretraining, "_set_rates", recording)
    Pretraining(replace(SMALL, restarts=(3,), warmup_steps=1)).run(
        tmp_path / "checkpoint.pt", lambda _: None, lambda *_: None
    )
    before, after = ([rate for bucket, rate in rates if bucket == wanted] for wanted in (2, 3))
    assert before == sorted(before, reverse=True) and after[0] == SMALL.muon_learning_rate > before[-1]
    recipe = TrainingRecipe()
    firsts = {sum(phase.buckets for phase in recipe.phases[:index]) for index in range(len(recipe.phases))}
    assert set(recipe.restarts) <= firsts


def test_the_drill_on_rules_asks_for_two_words_that_other_rules_share() -> None:
    shared = 0
    for seed in range(50):
        told, seen, answers = (turn.text for turn in rules(random.Random(seed)))
        known = dict(re.findall(r"(\w+ and \w+): (\w+) broken\.", told))
        asked = seen.removesuffix("?").split(", ")
        assert answers == " ".join(f"{condition}: {known[condition]} broken." for condition in asked)
        words = [word for condition in known for word in condition.split(" and ")]
        shared += len(set(words)) < len(words)
    assert shared > 40


def test_reports_are_practised_with_many_questions() -> None:
    problem = draw_problem(PRACTICE["reports"](random.Random(0)), "train", 0)
    assert sum(message.is_answer for message in problem.messages) >= 4


def test_first_choices_of_a_model_that_knows_nothing_are_wrong() -> None:
    run = Pretraining(SMALL)
    assert first_choices(run.model, run.tokenizer, SMALL) == {"recall": 0.0, "branch_solve_merge": 0.0}


def test_the_command_trains_saves_scores_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "QUICK", SMALL)
    threads = torch.get_num_threads()
    arguments = ["train", "embedded", "--quick", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    arguments += ["--n", "4", "--processes", "1"]
    for _ in range(2):
        # Nobody learns in five buckets, and the command says so.
        assert "the run learnt next to nothing" in choreo(*arguments, code=1).output
    assert torch.get_num_threads() == threads
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert set(card["test_accuracy"]) == {QUICK_TASK.name}


def test_the_command_says_in_a_line_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "QUICK", SMALL)
    quick = ["train", "embedded", "--quick", "--run", str(tmp_path)]

    def uncompilable(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler\nlong story")

    monkeypatch.setattr("torch.compile", lambda *_, **__: uncompilable)
    for arguments, words in (
        (["--device", "nonsense"], "device 'nonsense' cannot be used"),
        (["--compile"], "the kernels cannot be compiled: no compiler. Train with --no-compile"),
    ):
        assert words in choreo(*quick, *arguments, code=1).output
    choreo(*quick, "--seed", str(10**20), code=2)


def test_the_seed_of_a_quick_run_is_the_one_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "QUICK", SMALL)
    arguments = ["train", "embedded", "--quick", "--seed", "4", "--run", str(tmp_path / "run"), "--n", "1"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "card.json").write_text("of older weights")
    choreo(*arguments, "--out", str(tmp_path / "out"), "--processes", "1", code=1)
    assert json.loads((tmp_path / "out" / "card.json").read_text())["recipe"]["seed"] == 4


def test_weights_never_stand_beside_the_card_of_others(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text("of older weights")
    save_model(Pretraining(SMALL), tmp_path)
    assert not (tmp_path / "card.json").exists() and not list(tmp_path.glob("*.partial"))


def test_a_quick_run_is_held_to_far_more_than_chance() -> None:
    assert 1 / QUICK_TASK.facts <= QUICK_BAR / 3 + 0.01
    assert QUICK.shape.hidden_size < TrainingRecipe().shape.hidden_size
