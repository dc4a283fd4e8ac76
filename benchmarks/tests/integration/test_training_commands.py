"""`choreo train distill`, `choreo train synthesizer` and `choreo eval tuned`: killed, refused, explained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support.commands import Choreo
from bench_support.commands import choreo as run
from choreo_bench.cases import CASES
from choreo_bench.distilling.traces import DistillConfig, usual_variant
from choreo_bench.experiments import eval_tuned as tuned
from support.chatty import save_chatty

from choreo_agents.errors import TrainingError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.training.checkpoints import reserved
from choreo_agents.training.settings import TuneSettings

DISTIL = (
    *("train", "distill", "multi-qa", "--facts", "3", "--traces", "6", "--held-out", "2", "--epochs", "2"),
    *("--rank", "4", "--batch-tokens", "256"),
)
SYNTHESIZER = (
    *("train", "synthesizer", "--quick", "--examples", "6", "--epochs", "2", "--held-out", "1", "--rank", "4"),
    *("--sources", "tasks=1", "--batch-tokens", "256"),
)
BEFORE = """
from choreo_bench.distilling import traces as distilling
from choreo_bench.synthesizers import curriculum
from choreo_agents.training import tuning
distilling.CHUNK, tuning.CHECKPOINT_EVERY_S = 2, 0.0
tuning.Tuning.run.__kwdefaults__["checkpoint_every_s"] = 0.0
curriculum.LEARNT_TASKS = {name: curriculum.SYNTHESIS_TASKS[name] for name in ("vote", "hops")}
"""
"""Checkpoints after every batch, traces in small chunks, few tasks to be judged by."""


@pytest.fixture(scope="module")
def choreo() -> Iterator[Choreo]:
    made = Choreo(BEFORE)
    yield made
    made.close()


def finished(choreo: Choreo, *command: str) -> None:
    choreo.start(*command)
    assert choreo.ended() == 0


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def card(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "card.json").read_text())
    return {name: value for name, value in found.items() if name not in ("command", "minutes")}


def checkpoints(run: Path, least: int) -> bool:
    path = run / "checkpoint.pt"
    return path.exists() and torch.load(path, weights_only=True)["progress"]["steps"] >= least


@pytest.mark.slow
def test_a_distillation_that_is_killed_ends_with_the_same_bits(choreo: Choreo, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    finished(choreo, *DISTIL, "--run", str(whole))
    command = (*DISTIL, "--run", str(run))
    choreo.killed(*command, when=lambda: lines_of(run / "train-traces.jsonl") >= 3)
    assert not (run / "adapter" / "card.json").exists()
    choreo.killed(*command, when=lambda: checkpoints(run, 2))
    finished(choreo, *command)
    assert weights(run / "adapter") == weights(whole / "adapter") != {}
    assert card(run / "adapter") == card(whole / "adapter")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.suffix in (".safetensors", ".jsonl", ".pt")}
    finished(choreo, *command)
    assert {path: path.read_bytes() for path in before} == before, "there is nothing left to do"


@pytest.mark.slow
def test_a_synthesizer_that_is_killed_ends_with_the_same_bits(choreo: Choreo, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    finished(choreo, *SYNTHESIZER, "--run", str(whole))
    command = (*SYNTHESIZER, "--run", str(run))
    for steps in (1, 3):
        choreo.killed(*command, when=lambda steps=steps: checkpoints(run, steps))  # type: ignore[misc]
    finished(choreo, *command)
    assert weights(run / "synthesizer") == weights(whole / "synthesizer")
    assert set(weights(run / "synthesizer")) == {"adapter_model.safetensors", "mapper.safetensors"}
    assert card(run / "synthesizer") == card(whole / "synthesizer")


@pytest.fixture
def loaded_once(embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "choreo_agents.models.load_model",
        lambda name, **options: embedded if str(name) == "embedded" else load_model(name, **options),
    )
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture
def in_a_folder_of_its_own(loaded_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(*arguments: str, code: int = 0) -> str:
    result = run(*arguments, code=code, columns=300)
    assert isinstance(result.exception, SystemExit | None)
    return " ".join((result.stdout if code == 0 else result.output).replace("│", " ").split())


def test_a_distillation_tells_what_it_did_and_gave(loaded_once: None, tmp_path: Path) -> None:
    command = [*DISTIL, "--run", str(tmp_path / "run"), "--out", str(tmp_path / "mine")]
    out = said(*command)
    assert "untrained: held out" in out and "epoch 2: held out" in out
    assert "all right 0.0 % -> " in out and "held-out loss" in out
    assert re.search(r"\(re-encoded as text: 0\.\d{3}, \d+ % of the way\), best after epoch", out)
    assert f"Engine.load(..., adapter='{tmp_path}/mine')" in out
    assert json.loads((tmp_path / "mine" / "card.json").read_text())["settings"]["learning_rate"] == 5e-3
    assert said(*command).startswith("all right"), "nothing is trained, sampled or judged again"
    assert "by a run with other settings: continue with the same settings, or pass another folder" in said(
        *command, "--patience", "1", code=1
    )
    assert "results of another run, with temperature 1.0, not 0.5" in said(*command, "--temperature", "0.5", code=1)


def test_a_workflow_without_right_answers_is_judged_by_the_loss(loaded_once: None, tmp_path: Path) -> None:
    out = said(
        *("train", "distill", "prisoners-dilemma", "--talks", "1", "--traces", "2", "--held-out", "1", "--epochs", "1"),
        *("--rank", "2", "--run", str(tmp_path)),
    )
    assert "->" in out and "% ->" not in out and "held-out loss" in out


def test_a_synthesizer_tells_what_it_did_and_gave(loaded_once: None, tmp_path: Path) -> None:
    command = [*SYNTHESIZER, "--mapper-rank", "0", "--epochs", "1", "--layouts", "native,parallel"]
    out = said(*command, "--run", str(tmp_path / "run"), "--out", str(tmp_path / "mine"))
    assert "untrained, parallel: " in out and "untrained, native: " in out and "epoch 1, native: " in out
    assert "development problems solved" in out and f"adapter and card are in {tmp_path}/mine" in out
    assert f"Synthesizer(..., adapter='{'mine'}')" in out
    assert not (tmp_path / "mine" / "mapper.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (
            ("--variant", "spiral"),
            "no variant 'spiral' that reads caches: use choreo, serial, parallel",
            1,
        ),
        (("--variant", "baseline"), "no variant 'baseline' that reads caches", 1),
        (("--traces", "0"), "Invalid value for '--traces'", 2),
        (("--rank", "0"), "Invalid value for '--rank'", 2),
        (("--alpha", "0"), "error: --alpha 0.0: Input should be greater than 0", 1),
        (("--learning-rate", "0"), "error: --learning-rate 0.0: Input should be greater than 0", 1),
        (("--seed", "9999999999999999999"), "Invalid value for '--seed'", 2),
        (("--temperature", "-1"), "Invalid value for '--temperature'", 2),
        (("--prompts", "/nowhere.toml"), "No such file", 1),
        (("--model", "/nowhere"), "there is no folder '/nowhere'", 1),
        (("--out", "/proc/nowhere"), "No such file", 1),
        (("--run", "/proc/nowhere"), "No such file", 1),
        (("--facts", "1000"), "error: cannot draw 1000 different words from 64", 1),
    ],
)
def test_what_cannot_be_distilled_is_one_line(
    in_a_folder_of_its_own: Path, arguments: tuple[str, ...], message: str, code: int
) -> None:
    out = said("train", "distill", "multi-qa", *arguments, code=code)
    assert message in out and "untrained" not in out
    assert code == 2 or out.count("error:") == 1
    assert not list(in_a_folder_of_its_own.rglob("*.safetensors")), "nothing is done before everything is looked at"


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("--layouts", "spiral"), "unknown layout 'spiral': use some of sequential, parallel, native", 1),
        (("--layouts", ""), "unknown layout ''", 1),
        (("--sources", "songs=1"), "pass shares of dialogue, tasks, distilled, such as tasks=0.5", 1),
        (("--sources", "tasks=inf"), "--sources 'tasks=inf': pass shares", 1),
        (("--sources", "tasks=nan"), "--sources 'tasks=nan': pass shares", 1),
        (("--sources", "tasks=-1"), "--sources 'tasks=-1': pass shares", 1),
        (("--sources", "tasks=0"), "at least one share must be above 0", 1),
        (
            ("--rank", "0", "--mapper-rank", "0"),
            "there is nothing to train: set the rank of the adapter or of the mapper",
            1,
        ),
        (("--mapper-rank", "9999"), "a mapper's rank must be from 1 to", 1),
        (("--learning-rate", "nan"), "error: --learning-rate nan: Input should be greater than 0", 1),
        (("--dropout", "1"), "Invalid value for '--dropout'", 2),
        (("--out", "/proc/nowhere"), "No such file", 1),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    in_a_folder_of_its_own: Path, arguments: tuple[str, ...], message: str, code: int
) -> None:
    out = said("train", "synthesizer", *arguments, code=code)
    assert message in out and "untrained" not in out


def test_a_model_of_another_language_is_refused(loaded_once: None, tmp_path: Path) -> None:
    path = str(save_chatty(tmp_path / "chatty"))
    for command in (("train", "synthesizer"), ("eval", "synthesis"), ("eval", "tuned")):
        assert "was not trained on the embedded language" in said(*command, "--model", path, code=1)


@pytest.mark.parametrize("option", [("--sources", "tasks=1"), ("--examples", "9")])
def test_what_is_drawn_goes_not_with_merges_of_ones_own(in_a_folder_of_its_own: Path, option: tuple[str, str]) -> None:
    Path("own.jsonl").touch()
    out = said("train", "synthesizer", "--inputs", "own.jsonl", *option, code=1)
    assert "--sources and --examples apply to generated examples only" in out


@pytest.mark.parametrize(
    ("model", "options", "most"),
    [("embedded", (), 96), ("chatty", (), 512), ("chatty", ("--max-tokens", "7"), 7)],
)
def test_messages_are_learnt_as_long_as_they_are_when_they_are_run(
    in_a_folder_of_its_own: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: tuple[str, ...], most: int
) -> None:
    save_chatty(Path("chatty"))
    Path("own.jsonl").write_text('{"question": "What?"}\n{"question": "Who?"}\n')
    lessons: list[DistillConfig] = []

    def teach(_: object, lesson: DistillConfig, *__: object, **___: object) -> Any:
        lessons.append(lesson)
        raise TrainingError("not today")

    monkeypatch.setattr("choreo_bench.distilling.teaching.teach", teach)
    said("train", "distill", "direct", "--model", model, "--inputs", "own.jsonl", *options, code=1)
    assert [lesson.setup.sampling.max_tokens for lesson in lessons] == [most]


def test_a_folder_that_is_in_use_is_named(loaded_once: None, tmp_path: Path) -> None:
    with reserved(tmp_path):
        for command in (DISTIL, SYNTHESIZER):
            out = said(*command, "--run", str(tmp_path), code=1)
            assert f"another run is using '{tmp_path}': wait, or pass another folder" in out


def test_a_loss_that_is_no_number_is_one_line(
    loaded_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise TrainingError("the loss is not finite at trace 'train 3' (epoch 2)")

    monkeypatch.setattr("choreo_agents.training.tuning.Tuning.run", fails)
    out = said(*DISTIL, "--run", str(tmp_path), code=1)
    assert "error: the loss is not finite at trace 'train 3'" in out


def test_help_teaches() -> None:
    out = said("train", "--help")
    assert "distill" in out and "synthesizer" in out and "embedded" in out
    for name, case in CASES.items():
        spelled = name.replace("_", "-")
        page = said("train", "distill", spelled, "--help")
        assert case.summary in page and f"choreo train distill {spelled} --quick" in page and "--imitation" in page
        assert spelled in said("train", "distill", "--help")
    page = said("train", "synthesizer", "--help")
    assert "choreo train synthesizer --quick" in page and "--mapper-rank" in page and "native" in page
    assert "choreo eval synthesis --adapter" not in page, "it has no such option"
    assert "choreo eval tuned --n 100" in said("eval", "tuned", "--help")


def test_the_usual_variant_is_the_one_that_loses_most() -> None:
    usual = {name: usual_variant(case) for name, case in CASES.items()}
    assert usual["multi_qa"] == usual["branch_solve_merge"] == "parallel" and usual["debate"] == "choreo"


@pytest.mark.slow
def test_all_tables_as_text_as_json_and_again(
    loaded_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    courses = {
        name: replace(course, traces=2, held_out=1, epochs=1)
        for name, course in tuned.COURSES.items()
        if name in ("multi_qa-serial", "multi_qa-parallel", "prisoners_dilemma")
    }
    trials = tuple(trial for trial in tuned.TRIALS if trial.name == "MultiQA")
    monkeypatch.setattr(tuned, "COURSES", courses)
    monkeypatch.setattr(tuned, "TRIALS", trials)
    monkeypatch.setattr(tuned, "SETTINGS", TuneSettings(rank=2, batch_tokens=512, epochs=1))
    page = tmp_path / "page.md"
    command = ["eval", "tuned", "--n", "1", "--out", str(tmp_path / "a folder")]
    first = said(*command, "--report", str(page))
    assert "Table 3: how often Bob cooperates" in first and "multi_qa-serial, epoch 1: held out" in first
    text = page.read_text()
    assert text.startswith(f"`choreo eval tuned --n 1 --out '{tmp_path}/a folder' --report {page}`")
    assert "| Alice's strategy | baseline | choreo | choreo + tuned |" in text
    assert "## Table 3: how often Bob cooperates" in text and "| multi_qa-parallel | 2.2% | 2 | " in text
    again = run(*command, "--report", str(page), "--json")
    assert set(json.loads(again.stdout)) == {"tables", "dilemma", "cards"}
    assert page.read_text().replace(" --json`", "`") == text, "started again it is the same page"
    some = said(*command, "--workflows", "multi_qa", "--report", str(page))
    assert (
        "Alice" not in some
        and "Alice" not in page.read_text()
        and "| multi_qa-parallel | 2.2% | 2 | " in page.read_text()
    )
    unknown = run(*command, "--workflows", "multi_qa,chess", code=1)
    assert "the tables have no workflow 'chess': use some of" in unknown.output
