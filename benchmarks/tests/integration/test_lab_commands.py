"""The commands of the laboratory: what they show, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_support.commands import choreo
from choreo_bench.experiments.bench_engine import measure
from choreo_bench.experiments.bench_engine.measure import PARTS

from choreo_agents.models.random_llama import SHAPES, LlamaShape


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a command."""
    result = choreo(*arguments, code=code, columns=120)
    return result.stdout, result.stderr


def test_tasks_are_scored_in_every_view(tmp_path: Path) -> None:
    page = tmp_path / "new" / "language.md"
    arguments = ["eval", "language", "--n", "2", "--task", "recall", "--task", "arithmetic", "--seed", "5"]
    out, _ = run(*arguments, "--views", "ordinary,serial,parallel", "--report", str(page))
    for expected in ("recall", "arithmetic", "ordinary prompts", "caches, in sequence", "vote over 8 samples", "0.98"):
        assert expected in out
    command = "choreo eval language --n 2 --task recall --task arithmetic --seed 5 --views ordinary,serial,parallel"
    assert page.read_text().startswith(f"`{command} --report {page}`\n")
    assert page.read_text().count("| recall |") == 1


def test_an_evaluation_as_json_is_one_object_and_repeats() -> None:
    arguments = ["eval", "language", "--n", "3", "--task", "two_questions", "--json"]
    first, again = json.loads(run(*arguments)[0]), json.loads(run(*arguments)[0])
    assert first == again
    score = first["views"]["ordinary"]["two_questions"]
    assert score["count"] == 3 and 0 <= score["interval"][0] <= score["share"] <= score["interval"][1] <= 1
    assert first["arithmetic_sampled"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "recal"), "unknown task 'recal': use some of recall,"),
        (("--views", "ordinary,upside"), "unknown view 'upside': use some of ordinary, serial, parallel"),
        (("--model", "/nowhere"), "there is no folder '/nowhere'"),
    ],
)
def test_what_cannot_be_evaluated_is_one_red_line(arguments: tuple[str, ...], message: str) -> None:
    out, err = run("eval", "language", "--n", "1", *arguments, code=1)
    assert message in " ".join((out + err).split()) and "Traceback" not in out + err


def test_help_teaches_training_and_evaluation() -> None:
    for command, words in (
        (("eval", "language"), ("--task", "--views", "--split", "--json", "--report", "Examples")),
        (("train", "embedded"), ("--quick", "--run", "--out", "--compile", "--processes", "Examples")),
    ):
        out, _ = run(*command, "--help")
        for expected in words:
            assert expected in out


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_engines_are_timed_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts and names only: times are the machine's business."""
    monkeypatch.setitem(SHAPES, "six-layers", LlamaShape(2, 64, 96, 4, 2, 512))
    monkeypatch.setattr("choreo_bench.timing.REST_S", 0.0)
    table = tmp_path / "speed.md"
    arguments = ("bench", "engine", "--scale", "0.02", "--repeats", "2", "--threads", "1", "--report", str(table))
    arguments += ("--plot", str(tmp_path / "speed.png"))
    out, _ = run(*arguments, "--only", "reordered", "--only", "8 branches", "--json")
    report = json.loads(out)
    assert list(report["results"]) == ["first token, reordered reuse", "decode, 8 branches over 4k"]
    for found in report["results"].values():
        names = ("choreo", "choreo, plain weights", "HF dynamic", "HF static", "HF continuous", *PARTS)
        assert [name for name in found if name in names] == list(names)
        assert all(len(measured["seconds"]) == 2 for measured in found.values() if not measured["absent"])
        assert not found["choreo"]["absent"] and not found["HF dynamic"]["absent"]
    written = table.read_text()
    assert (tmp_path / "speed.png").exists()
    assert "met: " not in written and "missed: " not in written, "bars hold for whole lengths only"
    assert written.startswith("`choreo bench engine --scale 0.02 ") and "--only '8 branches'" in written
    assert "| the sum: no attention + calls alone |" in written
    assert "no such scenario" in run("bench", "engine", "--only", "nothing", code=1)[0]
    monkeypatch.setattr(measure, "measure_all", None)
    for option in ("--report", "--plot"):
        assert "No such file" in run("bench", "engine", option, "/proc/nowhere/page", code=1)[0]


def test_each_scenario_is_written_as_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[str] = []

    def measured(path: Any, dtype: Any, chosen: Any, *, repeats: int, on_scenario: Any, **_: Any) -> Any:
        report = measure.SpeedReport("tiny", "float32", 1, repeats)
        for scenario in chosen:
            times = {name: measure.Measured((0.5,)) for name in ("choreo", *PARTS)}
            report.results[scenario.name] = times
            on_scenario(report)
            written.append((tmp_path / "speed.md").read_text())
        raise KeyboardInterrupt

    monkeypatch.setitem(SHAPES, "six-layers", LlamaShape(1, 32, 64, 2, 1, 600))
    monkeypatch.setattr(measure, "measure_all", measured)
    words = ["bench", "engine", "--only", "4k", "--threads", "1", "--report", str(tmp_path / "speed.md")]
    run(*words, code=130)
    assert [each.count("## decode") for each in written] == [1, 2]


def test_a_seed_that_no_generator_takes_is_refused() -> None:
    seeded = ("eval debate", "eval tuned", "eval synthesis", "train synthesizer")
    for command in seeded:
        assert "Invalid value for '--seed'" in run(*command.split(), "--seed", "99999999999999999999", code=2)[1]
