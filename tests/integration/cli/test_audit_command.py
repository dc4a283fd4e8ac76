"""`choreo audit`, and the dilemma's commands."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.cli.graphs import current_folder

DILEMMA = "choreo_agents.workflows.graphs.prisoners_dilemma:graph"


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def test_the_dilemmas_leak_is_shown_with_the_edge_that_carries_it() -> None:
    out = run("audit", DILEMMA)
    for line in ("alice.system -> alice =shared=> bob", "alice.plan -> alice =shared=> bob", "alice -> bob: reencoded"):
        assert line in out
    assert "words" not in out.split("blocked")[0] and "Not covered by the audit: " in out
    assert "blocked: bob reads alice as encoded without bob.system" in out


def test_with_the_edge_reencoded_only_words_are_left() -> None:
    found = json.loads(run("audit", DILEMMA, "--set", "alice:bob=reencoded", "--set", "bob:alice=reencoded", "--json"))
    assert {(f["context"], f["reader"], f["channel"]) for f in found["findings"]} == {
        ("alice.system", "bob", "words"),
        ("alice.plan", "bob", "words"),
        ("bob.system", "alice", "words"),
        ("bob.plan", "alice", "words"),
    }


def test_a_broken_policy_is_exit_code_1() -> None:
    out = run("audit", DILEMMA, "--keep", "alice.plan=alice", code=1)
    assert "broken: the policy keeps 'alice.plan' from 'bob' (encoding)" in out
    run("audit", DILEMMA, "--keep", "alice.plan=alice", "--set", "alice:bob=reencoded")
    run("audit", DILEMMA, "--keep", "alice.plan=alice,bob")
    assert "'alice.pln' of the policy is not a private context" in run("audit", DILEMMA, "--keep", "alice.pln", code=1)


def test_paths_are_drawn_in_the_graphs_own_picture() -> None:
    out = run("audit", DILEMMA, "--mermaid", "--keep", "alice.plan=alice", code=1)
    assert out.startswith("flowchart TD") and 'n_alice_46_system[["alice.system"]]:::private' in out
    assert "n_alice ==>|alice.plan| n_bob" in out and "n_alice -->|shared| n_bob" in out
    edges = [line for line in out.splitlines() if "-->" in line or "==>" in line or "-.->" in line]
    broken = next(i for i, line in enumerate(edges) if "n_alice ==>|alice.plan| n_bob" in line)
    assert f"linkStyle {broken} stroke:#d1495b" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "a graph must be named as module:graph, not 'nowhere'"),
        (["no.such.module:graph"], "cannot import the module 'no.such.module'"),
        (
            ["choreo_agents.workflows.graphs.debate:MODERATOR"],
            "is neither a ChoreoGraph nor a factory of one",
        ),
        (["choreo_agents.workflows.graphs.debate:missing"], "is neither a ChoreoGraph"),
        ([DILEMMA, "--set", "alice=reencoded"], "a rule must be SOURCE:READER=MODE"),
        ([DILEMMA, "--set", "alice:bob=public"], "unknown visibility 'public'"),
        ([DILEMMA, "--set", "alice:carl=shared"], "names 'carl', which is not a node"),
        ([DILEMMA, "--set", "alice:alice=shared"], "'alice' always sees its own messages"),
    ],
    ids=str,
)
def test_what_cannot_be_audited_is_one_line(arguments: list[str], says: str) -> None:
    assert says in run("audit", *arguments, code=1).replace("\n", " ")


def test_a_graph_of_a_file_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_to_audit.py").write_text(
        "from choreo_agents import START, Agent, ChoreoGraph\n"
        "graph = ChoreoGraph()\n"
        "graph.add_node(Agent('ann', system='S.')).add_edge(START, 'ann')\n"
    )
    monkeypatch.chdir(tmp_path)
    out = run("audit", "mine_to_audit:graph")
    assert "No private context of mine_to_audit:graph reaches any other persona." in out


def test_findings_are_folded_worst_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folded_team.py").write_text(
        "from langgraph.prebuilt import ToolNode, tools_condition\n"
        "from choreo_agents import END, START, Agent, ChoreoGraph\n"
        "def look_up(key: str) -> str:\n    'Look a key up.'\n    return key\n"
        "names = ['planner', 'researcher', 'critic', 'writer']\n"
        "graph = ChoreoGraph()\n"
        "for name in names:\n"
        "    graph.add_node(Agent(name, system='S.', tools=[look_up] if name == 'researcher' else None))\n"
        "graph.add_node('tools', ToolNode([look_up])).add_edge(START, 'planner').add_edge('planner', 'researcher')\n"
        "graph.add_conditional_edges('researcher', tools_condition, {'tools': 'tools', '__end__': 'critic'})\n"
        "graph.add_edge('tools', 'researcher').add_edge('critic', 'writer', visibility='reencoded')\n"
        "graph.add_edge('planner', 'writer').add_edge('writer', END)\n"
    )
    monkeypatch.chdir(tmp_path)
    out = run("audit", "folded_team:graph", "--keep", "researcher.system=", code=1)
    lines = out[out.index("shortest path") : out.index("blocked")].splitlines()
    rows = [re.split(r" {2,}", line.strip())[:3] for line in lines if re.match(r"\W*\w+\.system {2}", line)]
    assert rows == [
        ["✗ researcher.system", "critic", "encoding"],
        ["planner.system", "researcher, critic, writer", "encoding"],
        ["researcher.system", "writer", "words"],
        ["critic.system", "researcher, writer", "words"],
        ["writer.system", "researcher, critic", "words"],
    ]
    assert "blocked: researcher reads tools as encoded without input, planner" in out


def test_a_graph_that_is_compiled_or_not_is_audited_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "both_ways.py").write_text(
        "from choreo_agents import START, Agent, ChoreoGraph, Engine\n"
        "graph = ChoreoGraph()\n"
        "graph.add_node(Agent('ann', system='S.')).add_node(Agent('bob'))\n"
        "graph.add_edge(START, 'ann').add_edge('ann', 'bob')\n"
        "def app():\n    from choreo_agents.testing import Script\n    return graph.compile(engine=Script({}).load())\n"
        "def needs(engine):\n    return graph.compile(engine=engine)\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("graph", "app"):
        assert "ann.system -> ann =shared=> bob" in run("audit", f"both_ways:{name}")
        tried = run("audit", f"both_ways:{name}", "--set", "ann:bob=reencoded")
        assert "ann.system -> ann =reencoded=> bob" in tried and "words" in tried
    said = run("audit", "both_ways:needs", code=1).replace("\n", " ")
    assert "'both_ways:needs' cannot be called without arguments" in said


def test_a_policy_to_try_mends_as_the_graphs_own_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mending_itself.py").write_text(
        "from choreo_agents import START, Agent, ChoreoGraph, Policy\n"
        "graph = ChoreoGraph(policy=Policy(on_violation='reencode'))\n"
        "graph.add_node(Agent('ann', system='S.')).add_node(Agent('bob'))\n"
        "graph.add_edge(START, 'ann').add_edge('ann', 'bob')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert "re-encoded by the policy: ann -> bob" in run("audit", "mending_itself:graph", "--keep", "ann.system=ann")


def test_names_are_printed_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks like markup of the terminal's stands in names of nodes, and of the graph."""
    (tmp_path / "bracketed.py").write_text(
        "from choreo_agents import START, Agent, ChoreoGraph, Policy\n"
        "kept = Policy(confidential={'a[/b].system': {'a[/b]'}}, on_violation='reencode')\n"
        "def team(**options):\n"
        "    graph = ChoreoGraph(**options).add_node(Agent('a[/b]', system='S.')).add_node(Agent('c[/i]'))\n"
        "    return graph.add_edge(START, 'a[/b]').add_edge('a[/b]', 'c[/i]')\n"
        "class Teams:\n"
        "    pass\n"
        "teams = Teams()\n"
        "setattr(teams, 'open[/b]', team())\n"
        "setattr(teams, 'mended[/b]', team(policy=kept))\n"
        "setattr(teams, 'alone[/b]', ChoreoGraph().add_node(Agent('a')).add_edge(START, 'a'))\n"
    )
    monkeypatch.chdir(tmp_path)
    out = run("audit", "bracketed:teams.open[/b]")
    assert "what can reach whom in bracketed:teams.open[/b]" in out and "a[/b] -> c[/i]: reencoded" in out
    assert "re-encoded by the policy: a[/b] -> c[/i]" in run("audit", "bracketed:teams.mended[/b]")
    assert "of bracketed:teams.alone[/b] reaches" in run("audit", "bracketed:teams.alone[/b]")


@pytest.mark.slow
def test_the_dilemma_is_run_and_counted(tmp_path: Path) -> None:
    out = run("run", "prisoners-dilemma", "--method", "reencoded", "--alice", "cooperate", "--seed", "3")
    assert "prisoners dilemma on embedded, method reencoded" in out and "bob.plan" in out and "Bob cooperates" in out
    assert "prisoners_dilemma has no method 'all'" in run("run", "prisoners-dilemma", "--method", "all", code=1)
    table, plot = tmp_path / "dilemma.md", tmp_path / "dilemma.png"
    out = run("eval", "dilemma", "--n", "2", "--report", str(table), "--plot", str(plot))
    assert "no explicit strategy" in out and "leak plan" in out
    written = table.read_text()
    assert "`choreo" in written and written.count("\n| ") == 4, "its command, and a table"
    assert plot.read_bytes().startswith(b"\x89PNG")
    for option in ("--report", "--plot"):
        assert "No such file" in run("eval", "dilemma", "--model", "/nowhere", option, "/proc/nowhere/page", code=1)


def test_the_current_folder_is_looked_in_for_the_graph_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chain_of_many.py").write_text(
        "import beside_it\n"
        "from choreo_agents import Agent, ChoreoGraph, END, START\n"
        "graph = ChoreoGraph()\n"
        "for n in range(30):\n"
        "    graph.add_node(Agent(f'a{n}', system='You are one.'))\n"
        "    graph.add_edge(START if n == 0 else f'a{n - 1}', f'a{n}')\n"
        "graph.add_edge('a29', END)\n"
    )
    (tmp_path / "beside_it.py").write_text("")
    (tmp_path / "imported_later.py").write_text("")
    monkeypatch.chdir(tmp_path)
    out = run("audit", "chain_of_many:graph")
    assert "a0.system -> a0 =shared=> a1" in out
    assert "and 235 more: --json for all of them" in out, "30 * 29 / 2 pairs, of which 200 are printed"
    with pytest.raises(ModuleNotFoundError):
        import_module("imported_later")
    with current_folder():
        assert import_module("imported_later") is not None, "as for a graph that runs"
    assert len(json.loads(run("audit", "chain_of_many:graph", "--json"))["findings"]) == 435
