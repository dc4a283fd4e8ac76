"""What recordings and replays got wrong once: runs that they changed, differences that they missed, forged files."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Send
from support.recorded import FREE, QUESTION, THREAD, looking, recorded

from choreo_agents import START, Agent, ChoreoGraph, Sampling, fork, replay
from choreo_agents.engine.recording.format import read_recording
from choreo_agents.errors import InvalidRequestError, ReplayError
from choreo_agents.models import LoadedModel


def test_a_thread_in_two_recordings_loses_no_message(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Though a subgraph's function says the same in every run."""
    engine = make_engine()
    inner = ChoreoGraph().add_node("echo", lambda _: {"messages": [AIMessage("ok")]})
    graph = ChoreoGraph().add_node("sub", inner.add_edge(START, "echo").compile(engine=engine))
    graph.add_node(Agent("bob", sampling=FREE)).add_edge(START, "sub").add_edge("sub", "bob")
    app = graph.compile(InMemorySaver(), engine=engine)
    for name in ("one", "two"):
        with engine.record(tmp_path / name):
            state = app.invoke(QUESTION, THREAD)
    assert [message.text for message in state["messages"]].count("ok") == 2 and len(state["messages"]) == 6


def test_a_recording_that_cannot_begin_leaves_nothing_behind(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    (tmp_path / "run.jsonl.key").write_text("of another")
    with pytest.raises(InvalidRequestError, match="exists already"), engine.record(path):
        pass
    assert not path.exists() and "choreo-recording" not in [thread.name for thread in threading.enumerate()]
    (tmp_path / "run.jsonl.key").unlink()
    with engine.record(path):
        pass
    assert read_recording(path).cut is None


def test_a_line_that_cannot_be_written_is_told_at_the_end_of_the_block(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(engine=engine)
    with pytest.raises(Exception, match="surrogates not allowed"), engine.record(path):
        app.invoke(QUESTION, {"configurable": {"thread_id": "\ud800"}})
    assert read_recording(path).cut is not None and engine.record.under_way is None


def test_tenants_record_their_own_steps_side_by_side(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    other = engine.tenant("other")
    with engine.record(tmp_path / "one"), other.record(tmp_path / "two"):
        looking().compile(engine=engine).invoke(QUESTION)
        looking().compile(engine=other).invoke(QUESTION)
    for name in ("one", "two"):
        recording = read_recording(tmp_path / name)
        assert [call.author for call in recording.calls()] == ["ann", "bob"]
        assert sum(step.tokens for step in recording.steps()) == sum(call.tokens_encoded for call in recording.calls())


Forging = Callable[[dict[str, dict[str, Any]]], Any]


def forged(path: Path, forge: Forging) -> None:
    """Change the first line of each kind."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    forge({line["kind"]: line for line in reversed(lines)})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (lambda lines: lines["header"].update(format=4, conditions={}), "has format 4"),
        (lambda lines: lines["header"].pop("fingerprint"), "is not a recording"),
        (lambda lines: lines["header"].update(proof="0" * 32), "is the key of another recording"),
        (lambda lines: lines["run"].update(interrupts={"input": ["x"]}), "line 2 .* is damaged"),
        (lambda lines: lines["run"].update(input="msgpack:gqFh"), "of the recording is damaged"),
        (lambda lines: lines["run"].update(input="pickle:gASVCQ=="), "packed as 'pickle' cannot be read"),
    ],
)
def test_a_forged_recording_is_refused(make_engine: MakeEngine, tmp_path: Path, forge: Forging, says: str) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), looking(), path)
    forged(path, forge)
    with pytest.raises(InvalidRequestError, match=says):
        replay(app, path)


@pytest.mark.parametrize("token", [-1, 10**9, 10**30])
def test_tokens_that_are_not_the_models_reach_no_engine(make_engine: MakeEngine, tmp_path: Path, token: int) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), looking(), path)
    forged(path, lambda lines: lines["call"].update(tokens=[token]))
    for change in ({}, {"bob.prompt": "Tell."}):
        with pytest.raises(ReplayError, match="its tokens are not the model's"):
            fork(app, path, set=change)


@pytest.mark.parametrize("change", [lambda said: [*said, 7], lambda said: said[:-1], lambda said: []])
def test_answers_that_were_changed_are_no_answers(make_engine: MakeEngine, tmp_path: Path, change: Any) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), looking(), path)
    forged(path, lambda lines: lines["call"].update(tokens=change(lines["call"]["tokens"])))
    with pytest.raises(ReplayError, match="damaged"):
        replay(app, path)


def test_words_of_calls_that_share_a_place_are_set_one_by_one(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    inner = ChoreoGraph().add_node(Agent("ann", sampling=FREE)).add_edge(START, "ann").compile(engine=engine)
    graph = ChoreoGraph().add_node("team", inner)
    boxes = [Send("team", {"messages": [("user", f"Box {number}.")]}) for number in (1, 2)]
    graph.add_conditional_edges(START, lambda _: boxes, ["team"])
    app = recorded(engine, graph, path)
    first, second = read_recording(path).calls()
    assert first.place == second.place and replay(app, path).same
    report = fork(app, path, set={"team|ann:2.words": "Two."})
    assert sorted(call.outcome for call in report.calls) == ["set", "taken"]
    [changed] = report.changed
    assert (changed.recorded, changed.words) == (second.text, "Two.")


@pytest.mark.parametrize("slower", ["ann", "bob"])
def test_a_record_that_is_cut_in_a_superstep_is_compared_as_far_as_it_goes(
    make_engine: MakeEngine, tmp_path: Path, slower: str
) -> None:
    """Whom it has not yet is not awaited, and stops nobody beside him, whichever of them is asked first."""
    path, graph = tmp_path / "run.jsonl", ChoreoGraph()
    longer = Sampling(temperature=1.0, max_tokens=20, stop_tokens=())
    for name in ("ann", "bob"):
        graph.add_node(Agent(name, sampling=longer if name == slower else FREE)).add_edge(START, name)
    app = recorded(make_engine(), graph, path)
    lines = path.read_bytes().splitlines(keepends=True)
    calls = [(at, json.loads(line)["author"]) for at, line in enumerate(lines) if b'"call"' in line]
    (_, first), (last, _) = [each for each in calls if each[1] in ("ann", "bob")]
    path.write_bytes(b"".join(lines[:last]))
    report = replay(app, path)
    assert [(call.place[0], call.outcome) for call in report.calls] == [(first, "taken")] and report.sampled == 0


def test_runs_of_other_graphs_are_left_out_and_said(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    other = ChoreoGraph().add_node(Agent("ida", sampling=FREE)).add_edge(START, "ida").compile(engine=engine)
    app = looking().compile(engine=engine)
    with engine.record(path):
        other.invoke(QUESTION)
        app.invoke(QUESTION)
    report = replay(app, path)
    assert (
        report.same
        and {call.run for call in report.calls} == {1}
        and "run 1 belongs to another graph" in report.notes[0]
    )
    with pytest.raises(ReplayError, match="has no run of this graph"):
        replay(ChoreoGraph().add_node(Agent("zoe")).add_edge(START, "zoe").compile(engine=engine), path)


def test_runs_in_a_graph_of_langgraphs_are_recorded_and_not_made_again(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = ChoreoGraph().add_node(Agent("ann", sampling=FREE)).add_edge(START, "ann").compile(engine=engine)
    around: Any = StateGraph(MessagesState).add_node("inner", app).add_edge(START, "inner").compile(InMemorySaver())
    with engine.record(path):
        for _ in range(2):
            around.invoke(QUESTION, THREAD)
    assert [call.author for call in read_recording(path).calls()] == ["inner|ann"] * 2
    with pytest.raises(ReplayError, match="has no run of this graph"):
        replay(app, path)


def test_two_engines_of_a_graph_do_not_record_at_once(
    make_engine: MakeEngine, embedded: LoadedModel, tmp_path: Path
) -> None:
    one, two = make_engine(), make_engine(embedded)
    graph = ChoreoGraph().add_node(Agent("ann", engine=one)).add_node(Agent("bob", engine=two))
    app = graph.add_edge(START, "ann").add_edge("ann", "bob").compile()
    with (
        one.record(tmp_path / "1"),
        two.record(tmp_path / "2"),
        pytest.raises(InvalidRequestError, match="two engines"),
    ):
        app.invoke(QUESTION)


def test_what_functions_find_in_their_runtime_is_given(make_engine: MakeEngine, tmp_path: Path) -> None:
    def look(state: Any, runtime: Runtime[Any], config: RunnableConfig) -> Any:
        return {"messages": [AIMessage(f"{runtime.context['box']} {config['configurable']['lid']}")]}

    engine, path = make_engine(), tmp_path / "run.jsonl"
    graph = ChoreoGraph(context_schema=dict).add_node("look", look).add_node(Agent("ann", sampling=FREE))
    app = graph.add_edge(START, "look").add_edge("look", "ann").compile(engine=engine)
    app = app.with_config({"configurable": {"lid": "red"}})
    with engine.record(path):
        app.invoke(QUESTION, context={"box": 3})
    assert replay(app, path, context={"box": 3}).same
    assert not replay(app, path, context={"box": 4}).same
