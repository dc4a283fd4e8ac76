"""`choreo bench step`, on a few short steps; times are for elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bench_support.commands import choreo
from choreo_bench.experiments.bench_step.report import Machine, SampledTimes, StepShape, sampled_report

from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.runtime.loop import EngineLoop
from choreo_agents.runtime.step import StepMaker


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_says_of_each_shape_and_way_where_a_step_goes(tmp_path: Path) -> None:
    table = tmp_path / "step.md"
    before = EngineLoop._account, StepMaker.make
    words = ["bench", "step", "--shapes", "1x1,3x4", "--steps", "3", "--repeats", "2", "--report", str(table), "--json"]
    found = json.loads(choreo(*words).stdout)
    assert [(each["shape"]["rows"], each["shape"]["messages"], each["way"]) for each in found["times"]] == [
        (1, 1, "choreo"),
        (1, 1, "torch"),
        (3, 4, "choreo"),
        (3, 4, "torch"),
    ]
    for each in found["times"]:
        # A call of n tokens takes n steps and one for what closes it: of these, four at each end are not counted.
        assert each["steps"] == 2 * 4 and all(seconds > 0 for seconds in each["seconds"].values())
    said = table.read_text()
    assert said.startswith("`choreo bench step --shapes 1x1,3x4 --steps 3 --repeats 2 ")
    assert "| 3 | 4 x 128 | choreo |" in said and found["computed"]["torch"].startswith("transformers")
    assert (EngineLoop._account, StepMaker.make) == before, "nothing is timed any more"


@pytest.mark.parametrize(("shapes", "reason"), [("8", "not '8'"), ("0x4", "not '0x4'"), ("1x600", "--tokens 600")])
def test_what_is_no_shape_is_refused(shapes: str, reason: str) -> None:
    assert reason in choreo("bench", "step", "--shapes", shapes, code=1).output


def test_drawing_is_held_against_greedy_rows_over_the_same_logits(tmp_path: Path) -> None:
    table, before = tmp_path / "sampled.md", ModelAdapter.logits
    words = ["bench", "step", "--sampled", "--shapes", "2x3", "--steps", "3", "--repeats", "1", "--report", str(table)]
    found = json.loads(choreo(*words, "--json").stdout)
    assert [(each["shape"]["rows"], each["logits"]) for each in found["times"]] == [(2, "peaked"), (2, "flat")]
    assert all(0 < each["sampling"] < each["drawn"] and each["greedy"] > 0 for each in found["times"])
    said = table.read_text()
    assert "| 2 | 3 x 170 | peaked |" in said and found["lines"] == []
    assert ModelAdapter.logits is before, "models say what they say again"


def test_its_bars_are_those_of_32_rows() -> None:
    times = [SampledTimes(StepShape(rows, 1, 8), "peaked", 1.0, drawn, 0.1) for rows, drawn in ((8, 2.0), (32, 1.2))]
    assert sampled_report(Machine("tiny", "float32", 1, "torch"), times).lines == [
        "missed: 32 rows, peaked logits, over a greedy step, at most 1.10x: 1.20x"
    ]
