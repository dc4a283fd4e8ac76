"""What is shown of graphs and runs: where messages stand in recordings, tables, drawings."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import MakeEngine
from support.recorded import QUESTION, reading

from choreo_agents import START, Agent, ChoreoGraph, Policy, fork
from choreo_agents.engine.recording.format import RecordedMemory, RecordedMessage, read_recording
from choreo_agents.errors import InvalidRequestError
from choreo_agents.inspection import run_page
from choreo_agents.testing import Script

BAD = "<img src=x onerror=alert(1)>"


def test_a_recording_says_where_messages_stand_and_what_calls_cost(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = reading().compile(engine=engine)
    with engine.record(path):
        app.invoke(QUESTION)
    recording = read_recording(path)
    known = {line.name: line for line in recording.lines if isinstance(line, RecordedMessage)}
    calls = {call.author: call for call in recording.calls()}
    assert sum(call.tokens_encoded for call in calls.values()) == engine.stats().tokens_encoded
    assert sum(call.tokens_reused for call in calls.values()) == engine.stats().tokens_reused > 0
    for call in calls.values():
        made = known[call.answer]
        assert len(call.offsets) == len(call.view) and made.parents == call.view and made.position == call.position
        assert made.offsets == tuple(offset - call.position for offset in call.offsets)
        assert (made.author, made.origin) == (call.author, "decoded")
    judge = [known[name] for name in calls["judge"].view]
    [ann] = [each for each in judge if each.author == "ann"]
    [again] = [each for each in judge if each.sources]
    assert ann.name == calls["ann"].answer and ann.origin == "decoded" and not ann.sources
    assert again.sources == (calls["bob"].answer,) and again.origin == "prefilled"
    assert calls["judge"].offsets[calls["judge"].view.index(ann.name)] != ann.position, (
        "it stands elsewhere than it stood"
    )
    memory = [line for line in recording.lines if isinstance(line, RecordedMemory)]
    assert len(memory) >= 2 and memory[-1].device_bytes > memory[0].device_bytes
    assert {("ann", "judge", "shared"), ("bob", "judge", "reencoded")} <= set(recording.runs[0].edges)


def test_a_page_is_written_as_a_whole_and_shown_in_notebooks(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = reading().compile(engine=engine)
    with engine.record(path):
        app.invoke({"messages": [("user", BAD)]})
    page = run_page(path)
    page.write(tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text() == page.html and (tmp_path / "run.html").stat().st_mode & 0o77 == 0
    assert BAD not in page.html and page.html.count("<script") == 2
    shown = page._repr_html_()
    assert shown.count("<") == 2 and 'sandbox="allow-scripts"' in shown, "all of it is an attribute of one frame"
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        page.write(tmp_path / "nowhere" / "run.html")
    (tmp_path / "folder").mkdir()
    there = set(tmp_path.iterdir())
    with pytest.raises(InvalidRequestError, match="cannot be written: Is a directory"):
        page.write(tmp_path / "folder")
    assert set(tmp_path.iterdir()) == there, "no words of the run are left beside it"
    with pytest.raises(InvalidRequestError, match="is not a recording"):
        run_page(tmp_path / "run.html")


def test_a_graph_draws_visibilities_and_what_the_audit_found(make_engine: MakeEngine) -> None:
    app = reading().compile(engine=make_engine())
    drawing = app.draw()
    assert drawing.startswith("flowchart TD") and "-->|shared|" in drawing
    assert "==>|ann.system| n_judge" in drawing, "by its encoding"
    assert drawing._repr_markdown_() == f"```mermaid\n{drawing}\n```"


def test_names_are_drawn_as_they_are_whatever_they_hold(make_engine: MakeEngine) -> None:
    named = ChoreoGraph().add_node('the "x" --> [y]', Agent("a", system="Notes.")).add_node(Agent("b"))
    named.add_edge(START, 'the "x" --> [y]').add_edge('the "x" --> [y]', "b")
    drawing = named.draw()
    assert '["the #quot;x#quot; --> [y]"]' in drawing and '==>|"the #quot;x#quot; --> [y].system"| n_b' in drawing
    assert "linkStyle 1 " in drawing and "linkStyle 3 " not in drawing, "edges are counted, not arrows in names"
    unfinished = ChoreoGraph().add_node(Agent("b")).add_edge("a", "b")
    assert unfinished._repr_markdown_() == "`ChoreoGraph(b)`", "what is not whole has no drawing yet"
    engine = make_engine()
    assert repr(engine) == f"Engine({engine.model.name})"


def test_graphs_inside_and_private_contexts_are_drawn_apart_from_nodes() -> None:
    team = ChoreoGraph().add_node(Agent("x", system="Notes.")).add_node(Agent("x.system")).add_edge(START, "x")
    team.add_edge("x", "x.system")
    graph = ChoreoGraph().add_node(Agent("boss")).add_node("team", team.compile(engine=Script({}).load()))
    drawing = graph.add_edge(START, "boss").add_edge("boss", "team").draw()
    for line in (
        'subgraph n_team["team"]',
        "n_boss -->|shared| n_team",
        'c_team_124_x_46_system[["team|x.system"]]:::private',
    ):
        assert f"    {line}\n" in drawing
    assert "n_team_124_x_46_system:::private" not in drawing


def test_what_a_policy_changed_is_drawn_alike(make_engine: MakeEngine) -> None:
    policy = Policy(confidential={"ann.system": frozenset()}, channels={"encoding"}, on_violation="reencode")
    graph = ChoreoGraph(policy=policy).add_node(Agent("ann", system="Notes.")).add_node(Agent("bob"))
    app = graph.add_edge(START, "ann").add_edge("ann", "bob").compile(engine=make_engine())
    [label] = [edge.data for edge in app.get_graph().edges if (edge.source, edge.target) == ("ann", "bob")]
    assert label == "reencoded" and "n_ann -->|reencoded| n_bob" in app.draw()


def test_reports_are_tables_in_notebooks_and_text_in_them_is_text(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = reading().compile(engine=engine)
    with engine.record(path):
        app.invoke(QUESTION)
    stats = engine.stats()
    assert f"{stats.tokens_encoded:,}</td>" in stats._repr_html_()
    memory = engine.kv.memory_map()._repr_html_()
    assert "KV memory by tier" in memory and "<td" in memory
    audit = app.audit()._repr_html_()
    assert "ann.system" in audit and "judge" in audit
    changed = fork(app, path, set={"ann:1.words": BAD})._repr_html_()
    assert "messages differ from the record" in changed and "&lt;img src=x" in changed and BAD not in changed
