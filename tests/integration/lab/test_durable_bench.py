"""`choreo bench durable`: what is counted, counted a second time; times are for elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from choreo_agents import Engine
from choreo_agents.cli import app
from choreo_agents.lab.experiments.bench_durable import measure as module
from choreo_agents.lab.experiments.bench_durable.graph import DurableLengths, questions, team
from choreo_agents.lab.experiments.bench_durable.measure import DurableBench, DurableRun, engine_seconds
from choreo_agents.lab.experiments.bench_durable.report import DurableReport, as_markdown
from choreo_agents.models import LoadedModel
from choreo_agents.training.journal import Journal

LENGTHS = DurableLengths(turns=2, workers=2, task=5, answer=3)
SIZES = ("--turns", "2", "--workers", "2", "--task", "5", "--answer", "3")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "REST_S", 0.0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(embedded: LoadedModel) -> DurableBench:
    return DurableBench(embedded, LENGTHS, kv_budget_bytes=1 << 24)


def test_what_is_written_is_counted(bench: DurableBench) -> None:
    on, off = bench.run("on", 0, LENGTHS), bench.run("off", 0, LENGTHS)
    assert on.said == off.said and len(on.said) == 2 * (1 + 4)
    assert (on.calls, on.tokens) == (off.calls, off.tokens) == (8, 24)
    # Workers that end together may be one commit.
    assert 6 <= on.commits <= 8 and (off.commits, off.messages, off.lineage_bytes) == (0, 0, {})
    assert on.messages >= len(on.said) and {"", "rows", "notes", "answers", "holders"} == on.lineage_bytes.keys()
    assert 0 < sum(on.lineage_bytes[kind] for kind in module.KINDS) < on.lineage_bytes[""]
    assert on.lineage_bytes["holders"] < on.lineage_bytes["rows"]
    for run in (on, off):
        assert run.state_bytes["handles"] > 0 and run.state_bytes["messages"] > 0
        assert run.state_bytes["handles"] + run.state_bytes["messages"] < run.state_bytes[""]
        assert 0 < run.engine_s < run.process_s


def test_the_engines_thread_is_that_of_the_engine(embedded: LoadedModel) -> None:
    with Engine.load(embedded) as engine:
        engine.prefill("Ann has 3 red kites.")
        first = engine_seconds()
        assert first > 0
        with Engine.load(embedded) as other:
            other.prefill("Bob.")
            between = engine_seconds()
            other.prefill("Ann has 3 red kites. " * 20)
            assert engine_seconds() > between


def test_everybody_reads_everybody_and_rounds_have_other_words() -> None:
    table = team(LENGTHS, 0).visibility_table()
    assert all("*" in table[name] for name in ("planner", "worker 0", "worker 1", "writer"))
    assert questions(LENGTHS, 0) == questions(LENGTHS, 0) != questions(LENGTHS, 1) and len(questions(LENGTHS, 0)) == 2


def test_pairs_take_turns_and_known_ones_do_not_run_again(bench: DurableBench, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int]] = []

    def run(self: DurableBench, lasting: Any, number: int, lengths: DurableLengths) -> DurableRun:
        ran.append((lasting, number))
        size = {"": 10, "rows": 1, "notes": 1, "answers": 1, "holders": 1}
        return DurableRun(1.0, 1.0, 1.0, 8, 24, 6, 5, size, {"": 4, "messages": 2, "handles": 1}, (str(number),))

    monkeypatch.setattr(DurableBench, "run", run)
    journal, told = Journal(None, {}), list[str]()
    bench.measure(journal, 2, told.append)
    assert ran == [("on", -1), ("off", -1), ("off", 0), ("on", 0), ("on", 1), ("off", 1)]
    assert told == ["lineage off", "lineage on", "lineage on", "lineage off"]
    ran.clear()
    bench.measure(journal, 3)
    assert ran == [("on", -1), ("off", -1), ("off", 2), ("on", 2)]


def test_ratios_are_of_pairs() -> None:
    def run(seconds: float, **more: Any) -> dict[str, Any]:
        return {"engine_s": seconds, "process_s": 2.0, "wall_s": 3.0, "tokens": 10, "calls": 4} | more

    kept = {
        "commits": 4,
        "messages": 50,
        "lineage_bytes": {"": 400, "rows": 200, "notes": 100, "answers": 25, "holders": 50},
    }
    states = {"state_bytes": {"": 200, "messages": 100, "handles": 50}}
    pairs = [(1.0, 1.1), (2.0, 2.0), (4.0, 5.2)]
    records = [
        {"round": number, "alike": number > 0, "runs": {"off": run(off, **states), "on": run(on, **kept, **states)}}
        for number, (off, on) in enumerate(pairs)
    ]
    settings = {"model": "m", "dtype": "fp32", "device": "cpu", "threads": 1, "turns": 1, "workers": 2, "answer": 3}
    report = DurableReport(settings, records)
    assert next(iter(report.rows())) == (
        "CPU of the engine's thread, ms a token",
        "200.000",
        "200.000",
        "1.100",
        "1.000 to 1.300",
    )
    assert report.commits_per_call == 1.0
    assert report.bytes_per_thousand == {
        "file": 8000.0,
        "rows": 4000.0,
        "notes": 2000.0,
        "answers": 500.0,
        "holders": 1000.0,
    }
    assert report.shares == {"messages": 0.5, "handles": 0.25}
    assert report.lines()[-1] == "missed: both say the same words: 2 of 3 pairs"


def test_the_command_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, page = tmp_path / "pairs.jsonl", tmp_path / "durable.md"
    command = ["bench", "durable", "--model", "embedded", "--dtype", "fp32", *SIZES, "--repeats", "1"]
    command += ["--out", str(out)]
    result = CliRunner().invoke(app, [*command, "--report", str(page)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert (
        "commits for each call of a node" in result.output and "met: both say the same words: 1 of 1" in result.output
    )
    assert page.read_text().startswith(
        "`choreo bench durable --model embedded --dtype fp32 --turns 2 --workers 2 --task 5 --answer 3 --repeats 1 "
        "--seed 0 --threads 1`"
    )
    monkeypatch.setattr(DurableBench, "run", None)
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert found["settings"]["workers"] == 2 and len(found["rounds"]) == 1
    assert found["ratios"].keys() == {"engine_s", "process_s", "wall_s"}
    assert (
        as_markdown(DurableReport(found["settings"], found["rounds"]), "c").splitlines()[1:]
        == (page.read_text().splitlines()[1:])
    )
