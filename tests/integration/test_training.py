"""Training the embedded model: batches, checkpoints, resuming, and the command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.cli import train as train_command
from choreo_agents.errors import TrainingError
from choreo_agents.language import TASKS
from choreo_agents.training.batches import Batch, as_batches, bucket_batches
from choreo_agents.training.card import save_model, score_model, weights_sha256, write_card
from choreo_agents.training.checkpoints import Checkpoints
from choreo_agents.training.pretrain import Pretraining
from choreo_agents.training.progress import Progress, first_choices
from choreo_agents.training.recipe import MIX, QUICK, Phase, Recipe, Shape

SMALL = Recipe(
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
        self.heard: list[Progress] = []
        self.shares: dict[int, Mapping[str, float]] = {}

    def advance(self, progress: Progress) -> None:
        self.heard.append(progress)
        if progress.bucket == self.killed_at:
            raise KilledError

    def wants_scores(self, bucket: int) -> bool:
        return bucket == 4

    def scores(self, bucket: int, shares: Mapping[str, float]) -> None:
        self.shares[bucket] = shares


def trained(folder: Path, log: Log | None = None, recipe: Recipe = SMALL) -> Pretraining:
    run = Pretraining(recipe)
    run.run(Checkpoints(folder), log or Log(), checkpoint_every_s=0)
    return run


def same_weights(one: Pretraining, other: Pretraining) -> bool:
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("killed_at", [1, 2, 4])
def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(tmp_path: Path, killed_at: int) -> None:
    whole = trained(tmp_path / "whole")
    with pytest.raises(KilledError):
        trained(tmp_path / "killed", Log(killed_at))
    log = Log()
    resumed = trained(tmp_path / "killed", log)
    # The kill came before the bucket's own checkpoint: that bucket is trained again.
    assert [progress.bucket for progress in log.heard] == list(range(killed_at, 6))
    assert same_weights(whole, resumed)
    assert (resumed.step, resumed.tokens) == (whole.step, whole.tokens)


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
    assert [progress.bucket for progress in log.heard] == [1, 2, 3, 4, 5]
    assert log.heard[-1].buckets == SMALL.buckets == 5
    assert all(0 < progress.loss < 10 and progress.seconds > 0 for progress in log.heard)
    assert [progress.tokens for progress in log.heard] == sorted({progress.tokens for progress in log.heard})
    assert set(log.shares) == {4, 5}, "asked for, and at the end"
    assert set(log.shares[4]) == {"recall", "branch_solve_merge"}


def test_checkpoints_are_pruned_and_another_recipes_are_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000004.pt", "checkpoint-000005.pt"]
    with pytest.raises(TrainingError, match="other settings"):
        trained(tmp_path, recipe=replace(SMALL, clip_norm=2.0))


def test_a_damaged_checkpoint_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-000003.pt").write_bytes(b"half a file")
    with pytest.raises(TrainingError, match=r"checkpoint-000003.pt.* cannot be read"):
        trained(tmp_path)


def test_a_checkpoint_that_was_being_written_is_not_resumed_from(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-000009.partial").write_bytes(b"half a file")
    assert Checkpoints(tmp_path).newest() is None


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


def test_a_run_learns(tmp_path: Path) -> None:
    log = Log()
    recipe = replace(SMALL, phases=(Phase(12, {"induction": 1.0}, batch_tokens=512, batches=6),))
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
    assert all((batch.labels != Batch.IGNORED).any() for batch in first)


def test_the_mix_names_tasks_and_the_phases_follow_each_other() -> None:
    recipe = Recipe()
    assert set(MIX) <= set(TASKS)
    firsts = [sum(phase.buckets for phase in recipe.phases[:index]) for index in range(len(recipe.phases))]
    for first, phase in zip(firsts, recipe.phases, strict=True):
        assert recipe.phase(first) is recipe.phase(first + phase.buckets - 1) is phase
    with pytest.raises(IndexError, match=str(recipe.buckets)):
        recipe.phase(recipe.buckets)
    assert recipe.hardness(0) == 0.0 and recipe.hardness(recipe.buckets - 1) == 1.0


def test_first_choices_of_a_model_that_knows_nothing_are_wrong() -> None:
    run = Pretraining(SMALL)
    assert first_choices(run.model, run.tokenizer, SMALL) == {"recall": 0.0, "branch_solve_merge": 0.0}


def test_the_command_trains_saves_scores_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_command, "QUICK", SMALL)
    threads = torch.get_num_threads()
    arguments = ["train", "embedded", "--quick", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    arguments += ["--n", "4", "--threads", "1"]
    for _ in range(2):
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
        assert result.exit_code == 1, "nobody learns in five buckets, and the command says so"
        assert "the run learnt next to nothing" in result.output
        assert "Traceback" not in result.output
    assert torch.get_num_threads() == threads
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert set(card["test_accuracy"]) == {train_command.QUICK_TASK.name}


def test_a_quick_run_is_held_to_far_more_than_chance() -> None:
    assert 1 / train_command.QUICK_TASK.facts <= train_command.QUICK_BAR / 3 + 0.01
    assert QUICK.shape.hidden_size < Recipe().shape.hidden_size
