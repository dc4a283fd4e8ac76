"""`choreo simulate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.traced import call_line, message_line, run_line, written
from typer.testing import CliRunner

from choreo_agents import Engine, Memory
from choreo_agents.cli import app
from choreo_agents.lab.simulating import command as module
from choreo_agents.lab.simulating import installed, measuring
from choreo_agents.lab.simulating.costs import read_costs
from choreo_agents.workflows.debate import graph

QUESTION = {"messages": [("user", "What does Ann have?")]}


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("recording") / "run.jsonl"
    before = torch.get_num_threads()
    with Engine.load(memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        compiled = graph().compile(engine=engine)
        with engine.record(path):
            compiled.invoke(QUESTION)
    yield str(path)
    torch.set_num_threads(before)


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"costs": {"step_s": 0.01, "front_s": 0.002, "lookup_s": 0.0}}))
    return str(path)


def test_help_teaches() -> None:
    out = run("--help")
    assert "choreo simulate --trace run.jsonl --costs measure" in out and "simulated time" in out


def test_a_recording_is_played_on_several_numbers_of_engines(recording: str, costs: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "out.json", tmp_path / "engines.png"
    shown = run(
        *("--trace", recording, "--costs", costs, "--engines", "4,1,2,2", "--copies", "8"),
        *("--json", str(out), "--plot", str(plot)),
    )
    assert "48 calls" in shown and "in 8 copies; all at once; one front" in shown
    assert "guessed, not measured: call_s, copy_s" in shown and "a front is busy for" in shown
    found = json.loads(out.read_text())
    assert [each["engines"] for each in found["outcomes"]] == [1, 2, 4]
    assert all(each["calls"] == 48 for each in found["outcomes"])
    assert found["costs"]["step_s"] == 0.01 and found["costs"]["bytes_per_token"] == 2048
    assert plot.read_bytes()[:4] == b"\x89PNG"
    same = json.loads(run("--trace", recording, "--costs", costs, "--engines", "1,2,4", "--copies", "8", "--json", "-"))
    assert same["outcomes"] == found["outcomes"]


def test_runs_may_begin_at_random_and_be_placed_otherwise(recording: str, costs: str) -> None:
    usual = ("--trace", recording, "--trace", recording, "--costs", costs, "--engines", "2", "--copies", "4")
    first, other, least = (
        json.loads(run(*usual, *more, "--json", "-"))["outcomes"][0]
        for more in (("--rate", "5"), ("--rate", "5", "--seed", "1"), ("--rule", "least-loaded", "--fronts", "2"))
    )
    assert first["calls"] == other["calls"] == least["calls"] == 48
    assert first["makespan_s"] != other["makespan_s"] and least["fronts"] == 2
    assert "5 threads begun in a second, seed 0" in run(*usual, "--rate", "5")


def test_costs_are_measured_on_the_recorded_model(
    recording: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "measured_costs", lambda engine, on_probe: measuring.measured_costs(engine, _FEW, on_probe)
    )
    saved = tmp_path / "saved.json"
    shown = run("--trace", recording, "--costs", "measure", "--save-costs", str(saved), "--engines", "1")
    assert "guessed, not measured: call_s, copy_s, copy_bytes_per_s, lookup_s" in shown
    kept = read_costs(saved)
    assert kept.measured_on is not None and kept.measured_on.model == "embedded"
    assert kept.costs["bytes_per_token"] == 2048 and kept.costs["step_s"] > 0


_FEW = measuring.Probe((4, 8), (1, 2), (4, 8), (1, 2), (1, 3), runs=1, repeats=1)


def test_what_cannot_be_played_is_one_red_line(recording: str, costs: str, tmp_path: Path) -> None:
    def complaint(*arguments: str) -> str:
        said = run(*arguments, code=1)
        assert said.count("error:") == 1 and "Traceback" not in said
        return " ".join(said.split())

    assert "there is nothing to play: --trace FILE" in complaint()
    assert "there is no recording" in complaint("--trace", str(tmp_path / "gone"))
    for wrong in ("1,x", "0", "-4", "", "1.5"):
        assert "--engines are numbers from 1 on" in complaint("--trace", recording, f"--engines={wrong}")
    damaged = tmp_path / "damaged"
    damaged.write_text(Path(recording).read_text().replace('"kind":"call"', '"kind":"cal"', 1))
    assert "is damaged" in complaint("--trace", str(damaged))
    assert "has no calls" in complaint("--trace", str(written(tmp_path / "silent", run_line())))
    other = written(tmp_path / "other", run_line(), message_line("ann"), call_line("ann", 1, 0.1, 0.2))
    assert "the traces are of two models" in complaint("--trace", recording, "--trace", str(other))
    assert "--rule is one of route, " in complaint("--trace", recording, "--rule", "none")
    assert "rate must be a number of threads in a second above 0" in complaint("--trace", recording, "--rate", "0")
    (tmp_path / "no.json").write_text('{"costs": {"speed": 1}}')
    assert "holds no costs" in complaint("--trace", recording, "--costs", str(tmp_path / "no.json"))
    told = json.loads(Path(costs).read_text())
    told["measured_on"] = {
        **dict.fromkeys(("machine", "processor", "device", "model", "fingerprint", "dtype"), "?"),
        **{"cores": 1, "threads": 1, "versions": {}},
    }
    (tmp_path / "other.json").write_text(json.dumps(told))
    of_another = ("--trace", recording, "--costs", str(tmp_path / "other.json"))
    assert "say --any-model to ask what if" in complaint(*of_another)
    assert "of the model '?'" in run(*of_another, "--any-model", "--engines", "1")


def test_without_simpy_it_is_said_what_to_install(recording: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    assert "pip install 'choreo-agents[simulate]'" in run("--trace", recording, code=1)
