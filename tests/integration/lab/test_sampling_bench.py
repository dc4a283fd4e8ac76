"""`choreo bench sampling`, on a few small rows; times are for elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.lab.experiments.bench_sampling.measure import CASES


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_is_told_as_json() -> None:
    result = CliRunner().invoke(app, ["bench", "sampling", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{") :])
    assert (found["rows"], found["words"], found["bars"]) == (4, 2_000, [])
    assert [case["name"] for case in found["cases"]] == [case.name for case in CASES]


def test_it_is_written_with_the_command_that_measures_it_again(tmp_path: Path) -> None:
    table = tmp_path / "sampling.md"
    words = ["bench", "sampling", "--rows", "2", "--words", "300", "--repeats", "1", "--report", str(table)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "`choreo bench sampling --rows 2 --words 300 --repeats 1 --threads 1`" in table.read_text()
    assert "greedy" in result.output and "filters leave" in result.output


def test_its_help_says_what_the_unit_is() -> None:
    assert "softmaxes" in CliRunner().invoke(app, ["bench", "sampling", "--help"]).output
