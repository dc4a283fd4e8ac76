"""Recordings that are played again: in words without running anything, and bit by bit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt
from support.recorded import FREE, QUESTION, calling, executions, looking, save_caller

from choreo_agents import START, Agent, ChoreoGraph, Command, RunOptions, Sampling, Send, Worker, areplay, replay
from choreo_agents.engine.recording import read_recording
from choreo_agents.errors import ReplayError
from choreo_agents.graph.replaying import ReplayReport
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.workflows import debate
from choreo_agents.workflows.graphs.tree_of_thoughts import tree_of_thoughts

LONGER = Sampling(temperature=1.0, max_tokens=14)
OTHER = "Ann has 7 blue cups."
BOTH: Any = pytest.mark.parametrize("expect", ["words", "bits"])


def debating() -> ChoreoGraph:
    notes = {"alice": "Ann has 3 red kites.", "bruno": "Ann has 7 blue cups.", "clara": None}
    return debate(notes, rounds=2, system="Agents read their notes.", sampling=FREE)


def thinking() -> ChoreoGraph:
    return tree_of_thoughts(
        branches=3, voters=2, depth=2, think="Think.", go_on="Go on.", vote="Vote.", answer="Answer.", sampling=LONGER
    )


def recorded(engine: Any, graph: ChoreoGraph, path: Path, **options: Any) -> Any:
    app = graph.compile(engine=engine)
    with engine.record(path, bits=True, **options):
        app.invoke(QUESTION, {"configurable": {"choreo": RunOptions(seed=5)}})
    return app


@BOTH
@pytest.mark.parametrize("make", [debating, thinking])
def test_a_workflow_comes_again(make_engine: MakeEngine, tmp_path: Path, make: Any, expect: Any) -> None:
    app = recorded(make_engine(), make(), tmp_path / "run.jsonl")
    report = replay(app, tmp_path / "run.jsonl", expect)
    assert report.same, report
    recording = read_recording(tmp_path / "run.jsonl")
    assert len(report.calls) == len(recording.calls()) == {"debating": 6, "thinking": 11}[make.__name__]
    assert report.given == len(recording.nodes()) and report.ran == ()
    if expect == "bits":
        assert report.steps == len(recording.steps())


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_caller(tmp_path_factory.mktemp("caller")))


@BOTH
def test_a_tool_is_not_run_again(make_engine: MakeEngine, caller: LoadedModel, tmp_path: Path, expect: Any) -> None:
    """Its result differs whenever it is run: what is said about it is the same since it is not."""
    executions.clear()
    app = recorded(make_engine(caller, kv_budget_bytes=1 << 25), calling(), tmp_path / "run.jsonl")
    assert executions["count"] == 1
    report = replay(app, tmp_path / "run.jsonl", expect)
    assert report.same and report.given == 1, report
    assert executions["count"] == 1
    again = replay(app, tmp_path / "run.jsonl", run="tools")
    assert executions["count"] == 2 and again.ran == ("tools",)
    assert again.differences == ("run 1 ended in another state",), "the tool said something else"


def test_bits_are_refused_where_they_cannot_come_again(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), looking(), path)
    torch.set_num_threads(2)
    try:
        with pytest.raises(ReplayError, match="threads: recorded with 1, here 2"):
            replay(app, path, "bits")
        assert len(replay(app, path, "words").calls) == 2
    finally:
        torch.set_num_threads(1)
    other = looking().compile(engine=make_engine(backend="reference"))
    with pytest.raises(
        ReplayError, match=r"backend: recorded with (FoldedBackend|NativeBackend for \w+), here ReferenceBackend"
    ):
        replay(other, path, "bits")
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    header["conditions"]["torch"] = "1.0"
    path.write_text("\n".join([json.dumps(header), *lines[1:], ""]))
    with pytest.raises(ReplayError, match=r"torch: recorded with 1\.0"):
        replay(app, path, "bits")
    (tmp_path / "run.jsonl.key").unlink()
    with pytest.raises(ReplayError, match=r"no run\.jsonl\.key"):
        replay(app, path, "bits")
    assert replay(app, path).same


def test_another_model_is_refused(make_engine: MakeEngine, embedded: LoadedModel, tmp_path: Path) -> None:
    recorded(make_engine(), looking(), tmp_path / "run.jsonl")
    with pytest.raises(ReplayError, match="model: recorded with"):
        replay(looking().compile(engine=make_engine(embedded, kv_budget_bytes=1 << 25)), tmp_path / "run.jsonl")


def test_a_changed_bit_is_found(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The first call whose view is another, and at which token; whatever was said is said again."""
    path = tmp_path / "run.jsonl"
    recorded(make_engine(), looking(), path)
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        found = json.loads(line)
        if found["kind"] == "call" and found["author"] == "bob":
            found["logits"][3] = "0" * 16
            lines[number] = json.dumps(found)
    path.write_text("\n".join([*lines, ""]))
    report = replay(looking().compile(engine=make_engine()), path, "bits")
    assert {call.place[0]: call.difference for call in report.calls} == {
        "ann": None,
        "bob": "the logits before token 4",
    }
    assert not report.same


def test_words_that_differ_are_shown(make_engine: MakeEngine, embedded: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(make_engine(embedded, kv_budget_bytes=1 << 25), looking(), path)
    engine = make_engine(embedded, kv_budget_bytes=1 << 25)
    other = looking().with_system("ann", OTHER).compile(engine=engine)
    report = replay(other, path)
    ann, bob = report.calls
    assert ann.difference is not None and ann.difference.startswith("token ") and "recorded" in ann.difference
    assert ann.words != ann.recorded and not report.same
    assert bob.place[0] == "bob"


def test_a_run_that_goes_elsewhere_stops_with_the_function_named(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(make_engine(), looking(), path)
    graph = looking()
    graph.add_node("again", lambda _: {}).add_edge("bob", "again", visibility={})
    report = replay(graph.compile(engine=make_engine()), path)
    assert any("no result of 'again'" in line and "--run again" in line for line in report.differences)
    assert not report.same


def test_masked_calls_are_compared_by_digests(make_engine: MakeEngine, embedded: LoadedModel, tmp_path: Path) -> None:
    """And what a function made of them has to be run, or recorded."""
    executions.clear()
    path = tmp_path / "run.jsonl"
    engine = make_engine(embedded, kv_budget_bytes=1 << 25)
    app = recorded(engine, looking(confidential=True), path)
    stopped = replay(app, path)
    assert any("might tell confidential words" in line for line in stopped.differences)
    ann = next(call for call in replay(app, path, run="look").calls if call.place[0] == "ann")
    assert ann.difference is None and ann.words is None and ann.recorded is None
    changed = looking(confidential=True).with_system("ann", OTHER).compile(engine=engine)
    ann = next(call for call in replay(changed, path, run="look").calls if call.place[0] == "ann")
    assert ann.difference == "its masked words differ"
    (tmp_path / "run.jsonl.key").unlink()
    blind = replay(changed, path, run="look")
    assert next(call for call in blind.calls if call.place[0] == "ann").difference is None
    assert any("masked words and states were not compared" in note for note in blind.notes)
    whole = tmp_path / "whole.jsonl"
    app = recorded(make_engine(), looking(confidential=True), whole, confidential=True)
    executions.clear()
    for expect in ("words", "bits"):
        assert replay(app, whole, expect).same  # type: ignore[arg-type]
    assert not executions


def asking() -> ChoreoGraph:
    def ask(state: Any) -> dict[str, Any]:
        executions["ask"] += 1
        return {"messages": [("user", f"They said {interrupt('Which?')}.")]}

    graph = ChoreoGraph()
    graph.add_node(Agent("ann", system="Ann has 3 red kites.", sampling=FREE)).add_node("ask", ask)
    graph.add_node(Agent("bob", sampling=FREE, reads={"ann": "reencoded", "ask": "shared"}))
    graph.add_edge(START, "ann").add_edge("ann", "ask", visibility={}).add_edge("ask", "bob")
    return graph


@BOTH
def test_an_interrupt_is_resumed_with_what_it_was(make_engine: MakeEngine, tmp_path: Path, expect: Any) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = asking().compile(InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "t"}}
    with engine.record(path, bits=True):
        app.invoke(QUESTION, config)
        app.invoke(Command(resume="the red one"), config)
        app.invoke({"messages": [("user", "And now?")]}, config)
        app.invoke(Command(resume="none"), config)
    executions.clear()
    recording = read_recording(path)
    assert [ended and ended.outcome for ended in map(recording.ended, range(4))] == ["interrupted", "done"] * 2
    report = replay(app, path, expect)
    assert report.same and len(report.calls) == 4, report
    assert not executions and report.given == 2
    assert len(app.get_state(config).values["messages"]) == 8, "the graph's own thread stays as it is"


@BOTH
def test_functions_of_subgraphs_are_given_their_results(make_engine: MakeEngine, tmp_path: Path, expect: Any) -> None:
    """Also where several branches run the same subgraph, and their calls have the same names."""
    executions.clear()
    engine, path = make_engine(), tmp_path / "run.jsonl"
    inner = looking().compile(engine=engine)
    graph = ChoreoGraph()
    graph.add_node("team", inner).add_node(Agent("judge", sampling=FREE, reads={"team": "shared"}))
    graph.add_conditional_edges(
        START,
        lambda state: [Send("team", {"messages": [("user", f"Look at box {box}.")]}) for box in (1, 2)],
        ["team"],
    )
    graph.add_edge("team", "judge", visibility={})
    app = recorded(engine, graph, path)
    assert executions["look"] == 2
    report = replay(app, path, expect)
    assert report.same and report.given == 2 and executions["look"] == 2, report
    assert sorted(call.place[0] for call in report.calls) == ["judge", *["team|ann"] * 2, *["team|bob"] * 2]


@BOTH
def test_workers_and_their_samples_come_again(make_engine: MakeEngine, tmp_path: Path, expect: Any) -> None:
    worker = Worker("worker", n=2, sampling=Sampling(temperature=1.0, max_tokens=9))
    graph = ChoreoGraph().add_node(worker)
    graph.add_conditional_edges(
        START, lambda state: [worker.send(state, f"Write part {part}.") for part in (1, 2, 3)], ["worker"]
    )
    app = recorded(make_engine(), graph, tmp_path / "run.jsonl")
    report = replay(app, tmp_path / "run.jsonl", expect)
    assert report.same and len(report.calls) == 6, report


async def test_the_async_form(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = debating().compile(engine=engine)
    with engine.record(path, bits=True):
        await app.ainvoke(QUESTION)
    told: list[tuple[int, int]] = []
    reports: list[ReplayReport] = [
        await areplay(app, path, "bits", progress=lambda done, of: told.append((done, of))),
        await asyncio.to_thread(replay, app, path),
    ]
    assert all(report.same for report in reports) and told == [(1, 1)]


def test_what_cannot_be_begun_again_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "t"}}
    app.invoke(QUESTION, config)
    with engine.record(path):
        app.invoke(QUESTION, config)
    with pytest.raises(ReplayError, match="goes on with thread 't', which began before the recording"):
        replay(app, path)
    with engine.record(tmp_path / "changed.jsonl"):
        fresh: Any = {"configurable": {"thread_id": "u"}}
        app.invoke(QUESTION, fresh)
        app.update_state(fresh, {"messages": [AIMessage("Zirconium.", id="z")]})
        app.invoke(QUESTION, fresh)
    report = replay(app, tmp_path / "changed.jsonl")
    assert any("run 2 began in another state" in line for line in report.differences)


def test_a_function_that_calls_agents_itself_is_no_part_of_the_bits(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    inner = ChoreoGraph().add_node(Agent("ann", sampling=FREE)).add_edge(START, "ann").compile(engine=engine)

    def ask(state: Any) -> dict[str, Any]:
        executions["inner"] += 1
        return {"messages": [AIMessage(str(inner.invoke(QUESTION)["messages"][-1].text))]}

    graph = ChoreoGraph().add_node("ask", ask).add_node(Agent("bob", sampling=FREE))
    app = recorded(engine, graph.add_edge(START, "ask").add_edge("ask", "bob"), path)
    executions.clear()
    assert [call.author for call in read_recording(path).calls()] == ["bob"]
    assert replay(app, path).same and not executions
    with pytest.raises(ReplayError, match="ask made calls of agents itself"):
        replay(app, path, "bits")
