"""What is said of simulations."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.traced import Spoken, costs_of, trace_of

from choreo_agents.errors import InvalidRequestError
from choreo_agents.lab.simulating import installed
from choreo_agents.lab.simulating.costs import KnownCosts
from choreo_agents.lab.simulating.outcome import percentile
from choreo_agents.lab.simulating.plot import save_simulation
from choreo_agents.lab.simulating.report import SimulationReport
from choreo_agents.lab.simulating.running import simulated

TRACE = trace_of([[Spoken(["doc"]), Spoken(["doc"], after=[0])]] * 4, {"doc": (40, [])})


def report(fronts: int = 1, **costs: float) -> SimulationReport:
    told: list[tuple[int, int]] = []
    found = simulated(
        [TRACE],
        [1, 2],
        KnownCosts(costs_of(**costs), ("a note",)),
        copies=3,
        fronts=fronts,
        on_call=lambda engines, calls: told.append((engines, calls)),
    )
    assert told == [(engines, calls) for engines in (1, 2) for calls in range(1, 25)]
    return found


def test_figures_of_each_number_of_engines_stand_in_a_row() -> None:
    found = report(front_s=0.001)
    rows = found.rows()
    assert [row[0] for row in rows] == ["1", "2"] and all(len(row) == len(found.columns()) for row in rows)
    one, two = found.outcomes
    assert two.calls_per_s > one.calls_per_s and rows[0][1] == f"{one.calls_per_s:,.1f}"
    assert one.utilisation > two.utilisation and one.samples == two.samples == 24 * 8
    assert found.title() == "24 calls, 192 tokens sampled: trace.jsonl in 3 copies; all at once; one front"
    plain = found.as_object()
    assert plain["settings"]["rule"] == "route" and plain["notes"] == ["a note"]
    assert plain["outcomes"][1]["first_token_s"]["p95"] == two.first_token(95)
    assert one.tokens_encoded == one.tokens_first + one.tokens_again + one.tokens_decoded


def test_it_is_said_what_calls_wait_for() -> None:
    front, memory = report(front_s=0.2, answer_s=0.05).lines()
    assert front == "a front is what calls wait for from 1 engines on; 4 calls/s at most, 250.00 ms each"
    assert "tokens of KV" in memory
    _, directory, _ = report(fronts=2).lines()
    assert directory == "the directory is busy for 0.0% of the time at most"
    front, directory, _ = report(fronts=2, lookup_s=0.2, directory_s=0.1).lines()
    assert front == "a front is busy for 0.0% of the time at most"
    assert directory.startswith("the directory is what calls wait for from ") and "ids each" in directory


def test_a_front_by_itself_has_no_directory() -> None:
    alone, several = report(lookup_s=0.2, directory_s=0.1), report(fronts=2, lookup_s=0.2, directory_s=0.1)
    assert not any("directory" in line for line in (*alone.lines(), *alone.columns()))
    assert several.columns() == (*alone.columns(), "directory")
    for found, has in ((alone, False), (several, True)):
        assert [len(row) for row in found.rows()] == [len(found.columns())] * 2
        assert all((each.directory_ids > 0) == (each.directory_load > 0) == has for each in found.outcomes)


def test_percentiles_are_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (50, 95, 99, 100)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([3.0], 50) == 3.0 and percentile([], 50) is None
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0 and percentile([1.0, 2.0, 3.0], 1) == 1.0


def test_it_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_simulation(report(front_s=0.001), tmp_path / "engines.png")
    assert (tmp_path / "engines.png").read_bytes()[:4] == b"\x89PNG"


def test_without_simpy_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'choreo-agents\[simulate\]'"):
        installed.require_simpy()
