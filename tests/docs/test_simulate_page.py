"""The page on simulations runs as it is written."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.lab.simulating import command as module
from choreo_agents.lab.simulating import measuring
from choreo_agents.lab.simulating.costs import COST_NAMES, CostsFile

PAGE = Path(__file__).parents[2] / "docs/how-to/simulate.md"
FEW = measuring.Probe((4, 8), (1, 2), (4, 8), (1, 2), (1, 3), runs=1, repeats=1)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    source = PAGE.read_text()
    [record] = re.findall(r"^```python\n(.*?)^```", source, re.DOTALL | re.MULTILINE)
    [network] = re.findall(r"^```json\n(.*?)^```", source, re.DOTALL | re.MULTILINE)
    commands = re.findall(r"^choreo (.*)$", source, re.MULTILINE)
    assert len(commands) == 3
    monkeypatch.chdir(tmp_path)
    (tmp_path / "network.json").write_text(network)
    measured = measuring.measured_costs
    monkeypatch.setattr(module, "measured_costs", lambda engine, on_probe: measured(engine, FEW, on_probe))
    exec(record, {})
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        assert ("call_s" in result.output) == ("network" not in command), "what no file says is said to be guessed"
    assert len(json.loads((tmp_path / "engines.json").read_text())["outcomes"]) == 4
    assert (tmp_path / "engines.png").stat().st_size > 0


def test_the_page_names_every_cost() -> None:
    table = PAGE.read_text().partition("| cost | |")[2]
    named = set(re.findall(r"`(\w+)`", table.partition("What no file says")[0]))
    assert named >= set(COST_NAMES)


@pytest.mark.parametrize(
    "path", sorted((PAGE.parents[1] / "benchmarks").glob("costs-*.json")), ids=lambda path: path.name
)
def test_costs_that_figures_were_made_with_can_be_read(path: Path) -> None:
    assert CostsFile.model_validate_json(path.read_text()).costs["bytes_per_token"] > 0
