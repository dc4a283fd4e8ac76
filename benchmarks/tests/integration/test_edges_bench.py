"""`choreo bench edges`: each shared edge of a graph, measured from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_support.commands import choreo

DEBATE = "choreo_agents.workflows.graphs.debate:graph"


def run(*arguments: str, code: int = 0) -> str:
    result = choreo("bench", "edges", *arguments, code=code, columns=160)
    return result.stdout if code == 0 else result.output


def test_edges_are_measured_from_the_command_line(tmp_path: Path) -> None:
    inputs, runs = tmp_path / "inputs.jsonl", tmp_path / "runs.jsonl"
    inputs.write_text(json.dumps({"messages": "What does Ann have?"}) + "\n")
    out = run(DEBATE, str(inputs), "--out", str(runs))
    assert "Alice -> Bruno" in out and "KL, nats" in out
    assert len(runs.read_text().splitlines()) == 6
    found = json.loads(run(DEBATE, str(inputs), "--out", str(runs), "--json"))["edges"]
    assert len(found) == 6 and all(each["tokens_saved"] > 0 for each in found)


@pytest.mark.parametrize("target", [DEBATE, "nowhere:graph"])
def test_what_cannot_be_measured_is_one_line(target: str, tmp_path: Path) -> None:
    out = run(target, str(tmp_path / "missing.jsonl"), code=1).replace("\n", " ")
    assert (
        "missing.jsonl" if target == DEBATE else "cannot import the module 'nowhere'"
    ) in out and "Traceback" not in out


def test_a_graph_imports_what_lies_beside_it_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "words_beside.py").write_text("WORDS = 'You are Bob.'\n")
    (tmp_path / "pair_to_measure.py").write_text(
        "from choreo_agents import END, START, Agent, ChoreoGraph, Sampling\n"
        "def words(state):\n"
        "    from words_beside import WORDS\n"
        "    return WORDS\n"
        "few = Sampling(max_tokens=4, temperature=0.0)\n"
        "graph = ChoreoGraph()\n"
        "graph.add_node(Agent('ann', system='You are Ann.', sampling=few))\n"
        "graph.add_node(Agent('bob', system=words, sampling=few))\n"
        "graph.add_edge(START, 'ann').add_edge('ann', 'bob').add_edge('bob', END)\n"
    )
    (tmp_path / "inputs.jsonl").write_text(json.dumps({"messages": "What does Ann have?"}) + "\n")
    monkeypatch.chdir(tmp_path)
    assert "ann -> bob" in run("pair_to_measure:graph", "inputs.jsonl")
