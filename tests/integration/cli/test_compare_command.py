"""`choreo compare`: a graph under several methods, on inputs of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from choreo_agents.cli.app import app

GRAPH = "choreo_agents.workflows.graphs.debate:graph"
INPUTS = '"What does Fred have?"\n\n{"messages": [["user", "What does Omar have?"]]}\n'


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    path = tmp_path / "inputs.jsonl"
    path.write_text(INPUTS)
    return path


def test_a_graph_is_compared_on_the_inputs_of_a_file(inputs: Path) -> None:
    shown = run(GRAPH, str(inputs), "--repeats", "1", "--methods", "choreo, naive")
    assert "tokens encoded" in shown and "naive/choreo" in shown and "of 2 inputs have identical answers" in shown
    found = json.loads(run(GRAPH, str(inputs), "--repeats", "1", "--methods", "choreo,naive", "--json"))
    assert found["methods"]["choreo"]["tokens_encoded"] < found["methods"]["naive"]["tokens_encoded"]
    assert [list(each["answers"]) for each in found["inputs"]] == [["choreo"], ["choreo"]]


@pytest.mark.parametrize(
    ("line", "said"), [("{", "line 3 of"), ("7", "is not a state or a quoted question"), ("", "has no items")]
)
def test_lines_that_are_no_input_are_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "inputs.jsonl"
    path.write_text(f"{INPUTS if line == '{' else ''}{line}".replace("\n\n", "\n", 1))
    assert said in " ".join(run(GRAPH, str(path), code=1).split())


def test_a_graph_without_a_synthesizer_has_no_strategies(inputs: Path) -> None:
    assert "no synthesizer" in run(GRAPH, str(inputs), "--strategies", "parallel", code=1)
