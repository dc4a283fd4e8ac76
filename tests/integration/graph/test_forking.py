"""Forks of recorded runs: what is taken, what is computed again, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from support.recorded import (
    FREE,
    QUESTION,
    THREAD,
    Counted,
    calling,
    executions,
    looking,
    outcomes,
    reading,
    recorded,
    routing,
    save_caller,
)

from choreo_agents import START, Agent, ChoreoGraph, RunOptions, Sampling, Worker, afork, fork, replay
from choreo_agents.engine.recording.format import read_recording
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.replaying import call_named
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.sampling import TokenSampler
from choreo_agents.workflows import debate

NOTES = {"alice": "Ann has 3 red kites.", "bruno": "Ann has 7 blue cups."}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many tokens were sampled."""
    found: Counter[str] = Counter()
    draw = TokenSampler.draw

    def drawing(self: TokenSampler, logits: Any) -> Any:
        found["tokens"] += 1
        return draw(self, logits)

    monkeypatch.setattr(TokenSampler, "draw", drawing)
    return found


def debating() -> ChoreoGraph:
    return debate(NOTES, rounds=2, system="Agents read their notes and answer the question.", sampling=FREE)


async def test_only_what_can_be_influenced_is_computed(
    make_engine: MakeEngine, embedded: LoadedModel, tmp_path: Path, drawn: Counter[str]
) -> None:
    engine, path = make_engine(embedded, kv_budget_bytes=1 << 25), tmp_path / "run.jsonl"
    app = debating().compile(engine=engine)
    with engine.record(path):
        await app.ainvoke(QUESTION)
    drawn.clear()
    report = await afork(app, path, set={"alice.system": "Ann has 9 old lamps."})
    found = outcomes(report)
    assert found["bruno:1"] == "taken", "who has not heard her yet"
    assert found["alice:1"] == "changed" and found["bruno:2"] in ("same", "changed")
    assert report.sampled == drawn["tokens"] == 18 and report.taken == 6
    changed = next(call for call in report.changed if call.place[:2] == ("alice", 1))
    assert changed.recorded != changed.words and changed.differs == ("view (__start__, alice.system)",)


def test_a_message_is_set(make_engine: MakeEngine, tmp_path: Path, drawn: Counter[str]) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), debating(), path)
    drawn.clear()
    report = fork(app, path, set={"alice:1.words": "Ann has a bag."})
    found = outcomes(report)
    assert found["alice:1"] == "set" and found["bruno:1"] == "taken"
    assert found["alice:2"] != "taken" and found["bruno:2"] != "taken"
    assert report.values["messages"][1].text == "Ann has a bag." and not report.same
    assert drawn["tokens"] == report.sampled == 12


def test_another_seed_is_for_those_who_draw(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Also where a function calls them; what comes of it is what a run with that seed says."""
    engine, path = make_engine(), tmp_path / "run.jsonl"
    inner = ChoreoGraph().add_node(Agent("ida", sampling=FREE)).add_edge(START, "ida").compile(engine=engine)
    graph = ChoreoGraph().add_node(Agent("greedy", sampling=Sampling(max_tokens=6, stop_tokens=())))
    graph.add_node(Agent("free", sampling=FREE)).add_node(Agent("own", sampling=FREE.model_copy(update={"seed": 3})))
    graph.add_node("ask", lambda _: {"messages": [AIMessage(inner.invoke(QUESTION)["messages"][-1].text)]})
    for name in ("greedy", "free", "own", "ask"):
        graph.add_edge(START, name)
    app = recorded(engine, graph, path)
    kept = {"greedy:1": "taken", "own:1": "taken"}
    report = fork(app, path, set={"run.seed": 99})
    assert outcomes(report) == {**kept, "free:1": "changed", "ask|ida:1": "changed"}
    config: Any = {"configurable": {"choreo": RunOptions(seed=99)}}
    said = app.invoke(QUESTION, config)["messages"]
    assert [message.text for message in report.values["messages"]] == [message.text for message in said]
    assert {*outcomes(fork(app, path, set={"run.seed": 5})).values()} == {"taken"}


def test_another_input_is_the_first_runs(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(InMemorySaver(), engine=engine)
    with engine.record(path):
        app.invoke(QUESTION, THREAD)
        app.invoke({"messages": [("user", "And now?")]}, THREAD)
    report = fork(app, path, set={"input": "Where are the kites?"})
    assert len(report.calls) == 4 and "taken" not in outcomes(report).values()
    texts = [message.text for message in report.values["messages"]]
    assert texts[0] == "Where are the kites?" and "And now?" in texts
    whole = fork(app, path, set={"input": {"messages": [("user", "Who?"), ("user", "Why?")]}})
    assert [message.text for message in whole.values["messages"][:2]] == ["Who?", "Why?"]
    assert len(app.get_state(THREAD).values["messages"]) == 8, "the graph's own thread stays as it is"
    second = outcomes(fork(app, path, set={"ann:2.words": "Ann has a bag."}))
    assert (second["ann:1"], second["bob:1"], second["ann:2"]) == ("taken", "taken", "set")
    assert second["bob:2"] != "taken"


def test_another_prompt(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Of an agent, and of a worker whose instances are sent without instructions."""
    worker = Worker("worker", prompt="Write.", sampling=FREE)
    graph = ChoreoGraph().add_node(Agent("ann", prompt="Tell.", sampling=FREE)).add_node(worker)
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), graph.add_edge(START, "ann").add_edge("ann", "worker", visibility={}), path)
    assert {*outcomes(fork(app, path, set={"ann.prompt": "Tell."})).values()} == {"taken"}
    report = fork(app, path, set={"worker.prompt": "Write more."})
    assert [call.differs for call in report.calls[:1]] == [()] and report.calls[1].differs[0].startswith("view")


def test_a_tool_that_is_asked_the_same_is_run_and_says_the_same(make_engine: MakeEngine, tmp_path: Path) -> None:
    path, engine = tmp_path / "run.jsonl", make_engine(load_model(save_caller(tmp_path / "m")), kv_budget_bytes=1 << 25)
    app = recorded(engine, calling(), path)
    executions.clear()
    report = fork(app, path, set={"bob.system": "You are Bob."})
    assert executions["count"] == 1
    assert outcomes(report)["ann:1"] == "taken" and outcomes(report)["bob:1"] != "taken"


def test_a_route_that_changes_brings_new_calls_and_leaves_others_out(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), routing(), path)
    said = {call.author for call in read_recording(path).calls()}
    taken, other = ("bob", "cleo") if "bob" in said else ("cleo", "bob")
    report = fork(app, path, set={"ann:1.words": "B." if other == "bob" else "x."})
    assert outcomes(report)[f"{other}:1"] == "new" and outcomes(report)["ann:1"] == "set"
    assert [place[0] for place in report.missing] == [taken]
    assert [call.recorded for call in report.calls if call.place[0] == other] == [None]


def test_agents_of_subgraphs_are_told_otherwise(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    graph = ChoreoGraph().add_node("team", looking().compile(engine=engine))
    graph.add_node(Agent("judge", sampling=FREE, reads={"team": "shared"}))
    app = recorded(engine, graph.add_edge(START, "team").add_edge("team", "judge", visibility={}), path)
    found = outcomes(fork(app, path, set={"team|bob.system": "You are Bob."}))
    assert found["team|ann:1"] == "taken" and found["team|bob:1"] != "taken" and found["judge:1"] != "taken"


def summarising(rounds: int) -> ChoreoGraph:
    """Zoe and Ann speak, and a function puts one message in the place of all; so often, and then Bob speaks."""

    def summarise(state: Any) -> dict[str, Any]:
        told = HumanMessage(f"It was said: {state['messages'][-1].text}")
        return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), told], "looks": state.get("looks", 0) + 1}

    graph = ChoreoGraph(Counted, visibility="shared").add_node("summarise", summarise)
    for name in ("zoe", "ann", "bob"):
        graph.add_node(Agent(name, sampling=FREE))
    graph.add_edge(START, "zoe").add_edge("zoe", "ann").add_edge("ann", "summarise")
    return graph.add_conditional_edges(
        "summarise", lambda state: "ann" if state["looks"] < rounds else "bob", ["ann", "bob"]
    )


def test_what_was_said_after_messages_were_removed_is_not_before(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Bob reads what was made of Ann's words; and calls are numbered as they were made."""
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), summarising(3), path)
    recording = read_recording(path)
    said = [call for call in recording.calls() if call.author == "ann"]
    assert [call.superstep for call in said] == [2, 4, 6]
    assert [call_named(recording, "ann", number) for number in (1, 2, 3)] == said
    found = outcomes(fork(app, path, set={"ann:2.words": "Nine red boats."}))
    assert (found["zoe:1"], found["ann:1"], found["ann:2"]) == ("taken", "taken", "set")
    assert found["ann:3"] != "taken" and found["bob:1"] != "taken"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"alice.mood": "good"}, "a fork can set run.seed, input, NODE.system"),
        ({"alice.system": 3}, "each to a text"),
        ({"carl.system": "x"}, "nothing named 'carl.system' that can be replaced or set"),
        ({"run.seed": "x"}, "run.seed must be an integer"),
        ({"alice.words": "x"}, "a call must be NODE:NUMBER"),
        ({"alice:0.words": "x"}, "a call must be NODE:NUMBER"),
        ({"carl:1.words": "x"}, "'carl' has no calls"),
        ({"alice:9.words": "x"}, "'alice' has 2 calls"),
    ],
    ids=str,
)
def test_what_cannot_be_set_is_said(make_engine: MakeEngine, tmp_path: Path, change: Any, says: str) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), debating(), path)
    with pytest.raises(InvalidRequestError, match=says):
        fork(app, path, set=change)


def test_a_fork_is_recorded_as_it_went(make_engine: MakeEngine, tmp_path: Path) -> None:
    """And may be forked itself."""
    engine, path, forked, bad = make_engine(), tmp_path / "run", tmp_path / "fork", "<img src=x onerror=alert(1)>"
    app = recorded(engine, reading(), path)
    with engine.record(forked):
        report = fork(app, path, set={"ann:1.words": bad})
    recording = read_recording(forked)
    assert recording.cut is None and engine.record.under_way is None
    assert [(call.place, call.words) for call in report.calls] == sorted(
        ((call.place, call.text) for call in recording.calls()), key=lambda call: (call[0][1], call[0])
    )
    assert [(node.node, node.outcome) for node in recording.nodes()] == [("look", "result")]
    again = replay(app, forked)
    assert again.same and again.sampled == 0, "longer than her sampling allows, since it was set"
    assert bad not in report._repr_html_() and "&lt;img src=x" in report._repr_html_()
    assert "0 of 3 messages differ from the record; 0 tokens sampled" in replay(app, path)._repr_html_()
