"""Costs in files: which is used, and what is said of where they come from."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support.traced import CONDITIONS, HEADER, costs_of

from choreo_agents.engine.elsewhere import Costs
from choreo_agents.errors import InvalidRequestError
from choreo_agents.lab.simulating.costs import CostsFile, MeasuredOn, ServingCosts, known_costs, read_costs
from choreo_agents.lab.simulating.fitting import fitted

HERE = MeasuredOn.here(CONDITIONS | {"torch": "1"}, "m")


def measured(**changed: Any) -> CostsFile:
    """Costs of the recorded model, on this machine unless said otherwise."""
    told = {**HERE.model_dump(), "versions": {"choreo-agents": version("choreo-agents"), "torch": "1"}, **changed}
    return CostsFile(costs={"step_s": 0.5}, measured_on=MeasuredOn(**told))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    measured().save(tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == measured()
    assert json.loads((tmp_path / "costs.json").read_text())["measured_on"]["machine"] == platform.node()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nothing", "holds no costs"),
        ('{"costs": {"steps": 1}}', "there is no cost 'steps'"),
        ('{"costs": {"step_s": 0}}', "step_s must be a number above 0, not 0"),
        ('{"costs": {"row_s": -1}}', "row_s must be a number from 0 on"),
        ('{"format": 2, "costs": {}}', "format"),
        ('{"costs": {"step_s": 1}, "of": "mine"}', "of: "),
    ],
)
def test_what_is_no_costs_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(InvalidRequestError, match=complaint):
        read_costs(tmp_path / "costs.json")


def test_the_last_that_says_a_cost_counts() -> None:
    network = CostsFile(costs={"call_s": 0.1, "copy_s": 0.2, "step_s": 0.7})
    found = known_costs([measured(), network], HEADER)
    assert (found.costs.step_s, found.costs.call_s, found.costs.copy_s) == (0.7, 0.1, 0.2)
    assert found.costs.bytes_per_token == HEADER.bytes_per_token
    assert found.costs.routing == Costs(call_s=0.1, copy_s=0.2, step_s=0.7)
    [guessed] = found.notes
    assert guessed.startswith("guessed, not measured: ")
    assert "step_s" not in guessed and "row_s" in guessed and "cores" not in guessed
    assert [source.get("measured_on", {}).get("model") for source in found.sources] == ["m", None]


def test_costs_of_another_model_are_refused_unless_that_is_asked() -> None:
    other = measured(fingerprint="n", model="another")
    with pytest.raises(InvalidRequestError, match=r"of the model 'another' .*--any-model"):
        known_costs([other], HEADER)
    assert any("of the model 'another'" in note for note in known_costs([other], HEADER, any_model=True).notes)


@pytest.mark.parametrize(
    ("changed", "note"),
    [
        ({"machine": "elsewhere"}, "of the machine 'elsewhere'"),
        ({"threads": 4}, "measured with threads 4, and calls recorded with 1"),
        ({"device": "cuda"}, "measured with device cuda"),
        ({"versions": {"choreo-agents": "0.0", "torch": "1"}}, "choreo-agents 0.0"),
        ({"versions": {"torch": "2"}}, "measured with torch 2, and calls recorded with 1"),
    ],
)
def test_what_differs_is_said(changed: dict[str, Any], note: str) -> None:
    before, after = (known_costs([each], HEADER).notes for each in (measured(), measured(**changed)))
    assert [each for each in after if each not in before] == [each for each in after if note in each]
    assert len(after) == len(before) + 1


def test_a_step_costs_what_its_parts_cost() -> None:
    costs = costs_of(step_s=1.0, row_s=0.1, encode_tokens_per_s=10.0, attended_s=0.01, segment_s=0.001)
    assert costs.step_of(rows=3, tokens=8, attended=20, segments=5) == pytest.approx(1 + 0.2 + 0.5 + 0.2 + 0.005)
    with pytest.raises(InvalidRequestError, match="cores must be"):
        ServingCosts(cores=0)


def test_costs_are_fitted_and_none_is_less_than_nothing() -> None:
    rows = [[1.0, float(x), float(y)] for x in range(4) for y in range(4)]
    assert fitted(rows, [2 + 3 * x + 0.5 * y for _, x, y in rows]) == pytest.approx([2, 3, 0.5])
    found = fitted(rows, [2 + 3 * x - 0.5 * y for _, x, y in rows])
    assert found[2] == 0.0 and found[1] == pytest.approx(3)
    assert fitted([[1.0], [2.0]], [-1.0, -2.0]) == [0.0]
