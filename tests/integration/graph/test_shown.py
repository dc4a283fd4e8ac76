"""What is shown of graphs and runs: where messages stand in recordings, forks that are recorded, tables, drawings."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import MakeEngine
from support.recorded import QUESTION, reading

from choreo_agents.engine.recording import RecordedMemory, RecordedMessage, read_recording
from choreo_agents.errors import InvalidRequestError
from choreo_agents.inspection import run_page

BAD = "<img src=x onerror=alert(1)>"


def test_a_recording_says_where_messages_stand_and_what_calls_cost(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = reading().compile(engine=engine)
    with engine.record(path):
        app.invoke(QUESTION)
    recording = read_recording(path)
    known = {line.name: line for line in recording.lines if isinstance(line, RecordedMessage)}
    calls = {call.author: call for call in recording.calls()}
    assert sum(call.encoded for call in calls.values()) == engine.stats().tokens_encoded
    assert sum(call.reused for call in calls.values()) == engine.stats().tokens_reused > 0
    for call in calls.values():
        made = known[call.made]
        assert len(call.offsets) == len(call.reads) and made.parents == call.reads and made.at == call.end
        assert made.offsets == tuple(offset - call.end for offset in call.offsets)
        assert (made.author, made.origin) == (call.author, "said")
    judge = [known[name] for name in calls["judge"].reads]
    [ann] = [each for each in judge if each.author == "ann"]
    [again] = [each for each in judge if each.words_of]
    assert ann.name == calls["ann"].made and ann.origin == "said" and not ann.words_of
    assert again.words_of == (calls["bob"].made,) and again.origin == "given"
    assert calls["judge"].offsets[calls["judge"].reads.index(ann.name)] != ann.at, "it stands elsewhere than it stood"
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
    with pytest.raises(InvalidRequestError, match="is no recording"):
        run_page(tmp_path / "run.html")


def test_a_graph_draws_visibilities_and_what_the_audit_found(make_engine: MakeEngine) -> None:
    app = reading().compile(engine=make_engine())
    drawing = app.draw()
    assert drawing.startswith("flowchart TD") and "-->|shared|" in drawing
    assert "==>|ann.system| n_judge" in drawing, "by its encoding"
    assert drawing._repr_markdown_() == f"```mermaid\n{drawing}\n```"


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
