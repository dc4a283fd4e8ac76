"""Simulations beside real engines: what is measured, and that counts are the same where times cannot be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from typer.testing import CliRunner

from choreo_agents import Engine
from choreo_agents.cli import app
from choreo_agents.lab.experiments.bench_directory.measure import DirectoryBench, FarDirectory, saturated
from choreo_agents.lab.experiments.bench_directory.report import DirectoryReport
from choreo_agents.lab.experiments.bench_routing.measure import RoutingBench, key_of
from choreo_agents.lab.experiments.bench_routing.report import FIGURES as ROUTING_FIGURES
from choreo_agents.lab.experiments.bench_routing.report import RoutingReport
from choreo_agents.lab.experiments.bench_routing.workloads import WORKLOADS, lengths_of, record_workload
from choreo_agents.lab.experiments.bench_simulate import measure as module
from choreo_agents.lab.experiments.bench_simulate.measure import SimulateBench
from choreo_agents.lab.experiments.bench_simulate.report import SimulateReport, as_markdown
from choreo_agents.lab.experiments.bench_workflows.scenarios import Lengths
from choreo_agents.lab.simulating.costs import CostsFile, ServingCosts
from choreo_agents.lab.simulating.far import in_process, measured_far_cores, measured_transfer
from choreo_agents.lab.simulating.measuring import QUICK_PROBE, Probe, measured_cores, measured_costs, measured_front
from choreo_agents.lab.simulating.simulation import Setting, simulate
from choreo_agents.lab.simulating.trace import read_trace
from choreo_agents.models import LoadedModel
from choreo_agents.training.journal import Journal

FEW = Probe((4, 8), (1, 2), (4, 8), (1, 2), (1, 3), runs=1, repeats=1)
LENGTHS = Lengths(8, 8, 6)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "REST_S", 0.0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_costs_are_measured_part_by_part(make_engine: MakeEngine) -> None:
    told: list[str] = []
    engine = make_engine()
    found = measured_costs(engine, FEW, told.append)
    assert len(told) == FEW.parts and engine.stats().tokens_encoded > 0
    assert found.costs["bytes_per_token"] == engine.model.adapter.geometry.bytes_per_token
    assert {"encode_tokens_per_s", "step_s", "row_s", "attended_s", "segment_s"} <= found.costs.keys()
    assert found.measured_on is not None and found.measured_on.fingerprint == engine.model.adapter.fingerprint
    ServingCosts(**found.costs)  # type: ignore[arg-type]
    assert 0 < measured_cores(engine, FEW) <= 2
    assert engine.stats().messages == 0, "nothing of it stays"


def test_a_fronts_own_work_is_measured_without_any_engine(embedded: LoadedModel) -> None:
    found = measured_front(embedded, FEW)
    assert found["front_s"] > 0 and found["answer_s"] > 0 and found["token_s"] >= 0


def test_calls_and_copies_between_engines_are_measured(embedded: LoadedModel) -> None:
    found = measured_transfer(embedded, in_process, FEW)
    assert found.keys() == {"call_s", "copy_s", "copy_bytes_per_s"} and found["copy_bytes_per_s"] > 0


def test_a_simulated_engine_encodes_and_steps_as_a_real_one(embedded: LoadedModel, tmp_path: Path) -> None:
    """Counts are the same where nothing depends on times: one run, by itself."""
    for number, workload in enumerate(WORKLOADS):
        path = tmp_path / f"{number}.jsonl"
        record_workload(embedded, workload, lengths_of(workload, LENGTHS, 40), 1, path, lambda: None)
        trace = read_trace(path)
        real = sum(trace.messages[name].tokens for name in _encoded(trace))
        found = simulate([trace], 1, Setting(ServingCosts(bytes_per_token=8, front_s=0.0)))
        assert found.tokens_encoded == real and not found.tokens_again
        assert found.samples == sum(call.samples for call in trace.calls)


def _encoded(trace: Any) -> set[str]:
    """What calls read and made, and all that this came from."""
    found = {name for call in trace.calls for name in (*call.reads, call.made)}
    waiting = list(found)
    while waiting:
        for parent in trace.messages[waiting.pop()].parents:
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found


def test_tokens_of_a_recording_are_those_that_its_engine_has_encoded(embedded: LoadedModel, tmp_path: Path) -> None:
    from choreo_agents.lab.experiments.bench_workflows.scenarios import ScenarioWords, vocabulary_of
    from choreo_agents.workflows.running import run_graph

    made = WORKLOADS["debates"](ScenarioWords(vocabulary_of(embedded), LENGTHS, 0))
    with Engine.load(embedded) as engine, engine.record(tmp_path / "run.jsonl"):
        _, cost = asyncio.run(run_graph(engine, made.graph, [("user", made.question)], replay=made.said))
    found = simulate([read_trace(tmp_path / "run.jsonl")], 1, Setting(ServingCosts(bytes_per_token=8)))
    assert found.tokens_encoded == cost.tokens_encoded


def test_debates_are_measured_and_foretold_side_by_side(embedded: LoadedModel, tmp_path: Path) -> None:
    costs = CostsFile(costs={"step_s": 0.002, "front_s": 0.002})
    bench = SimulateBench(embedded, LENGTHS, debates=2, agents=2, rounds=2, costs=[costs])
    told: list[str] = []
    with Journal(tmp_path / "rounds.jsonl", {}) as journal:
        bench.measure(journal, 2, told.append)
        records = dict(journal.records)
    assert told == ["one engine", "2 engines"] * 2
    with Journal(tmp_path / "rounds.jsonl", {}) as journal:
        bench.measure(journal, 2, told.append)
        assert journal.records == records and len(told) == 8, "nothing is done again"
    for record in records.values():
        for engines in ("1", "2"):
            for how in ("measured", "simulated"):
                figures = record["engines"][engines][how]
                assert figures["calls_per_s"] == pytest.approx(8 / figures["makespan_s"])
                assert 0 < figures["first_token_s"] <= figures["first_token_p95_s"] < figures["makespan_s"]
    settings = {"model": "embedded", "dtype": "fp32", "device": "cpu", "threads": 1, "debates": 2, "agents": 2}
    settings |= {"rounds": 2, "utterance": 6, "torch": "1", "transformers": "1", "langgraph": "1"}
    report = SimulateReport(settings, [*records.values()])
    assert len([*report.rows()]) == 10 and len(report.lines()) == 8
    assert all(line.startswith(("met: ", "missed: ")) for line in report.lines())
    assert "2 debates of 2 agents and 2 rounds at once" in as_markdown(report, "choreo bench simulate")


def test_cores_that_engines_share_are_measured_beside_their_front(embedded: LoadedModel) -> None:
    told: list[str] = []
    assert 0 < measured_far_cores(embedded, in_process, QUICK_PROBE, told.append) <= 2
    assert told == ["two engines side by side"]


def test_the_bench_of_simulations_runs(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text('{"costs": {"step_s": 0.002}}')
    words = ["bench", "simulate", "--debates", "1", "--agents", "2", "--rounds", "1", "--utterance", "4"]
    words += ["--repeats", "1", "--costs", str(tmp_path / "costs.json"), "--report", str(tmp_path / "simulate.md")]
    result = CliRunner().invoke(app, [*words, "--json"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["errors"].keys() == {"1", "2"}
    assert "foretold within 15%" in (tmp_path / "simulate.md").read_text()


def test_rules_are_compared_on_recorded_workloads(embedded: LoadedModel, tmp_path: Path) -> None:
    record_workload(embedded, "debates", LENGTHS, 1, path := tmp_path / "run.jsonl", lambda: None)
    rules, told = ("route", "most-held"), list[str]()
    bench = RoutingBench({"debates": read_trace(path)}, ServingCosts(bytes_per_token=8), [1, 2], [0.5], rules, 3)
    with Journal(None, {}) as journal:
        bench.measure(journal, told.append)
        assert len(told) == bench.cells == len(journal.records) == 4
        found = journal.records[key_of("debates", 0.5, 2, "route")]
        assert found["calls"] == 6 * 9
        settings = {"workloads": ["debates"], "loads": [0.5], "engines": [1, 2], "rules": rules, "costs": {}}
        report = RoutingReport(settings, journal.records)
    assert all(len([*report.rows(figure)]) == 2 for figure in ROUTING_FIGURES)
    assert report.lines()[0].startswith("route: ")


@pytest.mark.slow
def test_the_bench_of_rules_runs() -> None:
    words = ["bench", "routing", "--engines", "1,2", "--load", "0.5", "--rules", "route,stays", "--per-engine", "1"]
    result = CliRunner().invoke(app, [*words, "--runs", "1", "--trunk", "50", "--json"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["simulations"]) == 4 * 2 * 2


def test_the_bench_of_rules_says_what_is_wrong() -> None:
    wrong = CliRunner().invoke(app, ["bench", "routing", "--load", "0"])
    assert wrong.exit_code == 1 and "--load are shares above 0" in wrong.output


class CountingDirectory:
    """Knows what it was told, and counts how often it is asked."""

    def __init__(self) -> None:
        self.known: dict[str, set[str]] = {}
        self.asked = self.found = self.told = 0
        self.clients = self.most_clients = 0

    async def report(self, front: str, engine: str, added: Collection[str], removed: Collection[str]) -> None:
        self.told += 1
        for each in added:
            self.known.setdefault(each, set()).add(engine)
        for each in removed:
            self.known.pop(each, None)

    async def holders(self, front: str, ids: Collection[str]) -> None:
        self.clients += 1
        self.most_clients = max(self.most_clients, self.clients)
        await asyncio.sleep(0)
        self.asked += len(ids)
        self.found += sum(each in self.known for each in ids)
        self.clients -= 1


def test_a_directory_is_filled_asked_and_told() -> None:
    directory, told = CountingDirectory(), list[str]()

    @asynccontextmanager
    async def make() -> AsyncIterator[FarDirectory]:
        yield directory

    bench = DirectoryBench(make, ids=2500, engines=3, fronts=2, per_request=4, requests=40, clients=(1, 8))
    with Journal(None, {}) as journal:
        bench.measure(journal, 2, told.append)
        assert len(told) == 2 * bench.cells == 8
        assert journal.records["fill"]["ids"] == 2500
        assert all(record["requests"] == 40 for key, record in journal.records.items() if key != "fill")
        settings = {"directory": "it", "ids": 2500, "engines": 3, "per_request": 4, "clients": (1, 8)}
        report = DirectoryReport(settings, journal.records, 2)
    assert directory.asked == directory.found == 2 * 2 * 40 * 4, "all that is asked for is known"
    assert directory.most_clients == 8 and directory.told == 3 + 2 * 2 * 40
    # What the last report of each client has told stays.
    assert len(directory.known) == 2500 + 2 * (1 + 8) * 4
    assert len([*report.rows()]) == 4 and len(report.lines()) == 3
    assert 0 < report.costs().costs["lookup_s"] < 1


def test_saturated_is_where_more_clients_get_no_more_done() -> None:
    assert saturated({1: 100.0, 4: 390.0, 16: 400.0, 64: 380.0}) == 4
    assert saturated({1: 100.0, 4: 200.0}) == 4
    assert saturated({1: 100.0, 4: 50.0}) == 1


def test_the_bench_of_the_directory_runs(tmp_path: Path) -> None:
    words = ["bench", "directory", "--ids", "2000", "--requests", "20", "--clients", "1,2", "--repeats", "1"]
    words += ["--save-costs", str(tmp_path / "costs.json"), "--report", str(tmp_path / "directory.md")]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "filled with 2,000 ids" in result.stdout and "lookups saturate with" in result.stdout
    assert json.loads((tmp_path / "costs.json").read_text())["costs"]["lookup_s"] > 0
    assert "choreo bench directory" in (tmp_path / "directory.md").read_text()
