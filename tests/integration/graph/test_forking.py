"""Forks of recorded runs: what is taken, what is computed again, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt
from support.recorded import FREE, QUESTION, calling, executions, looking, reading, routing, save_caller

from choreo_agents import (
    END,
    START,
    Agent,
    ChoreoGraph,
    Command,
    Engine,
    RunOptions,
    Sampling,
    Worker,
    afork,
    fork,
    replay,
)
from choreo_agents.engine.recording import read_recording
from choreo_agents.errors import InvalidRequestError, ReplayError
from choreo_agents.graph.replaying.stage import Stage
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


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engines of forks have done."""
    found: list[Any] = []
    leave = Stage.__exit__

    def leaving(self: Stage, *args: object) -> None:
        found.append(self.engine.stats())
        leave(self, *args)

    monkeypatch.setattr(Stage, "__exit__", leaving)
    return found


def recorded(engine: Engine, graph: ChoreoGraph, path: Path, **options: Any) -> Any:
    app = graph.compile(engine=engine)
    with engine.record(path, **options):
        app.invoke(QUESTION, {"configurable": {"choreo": RunOptions(seed=5)}})
    return app


def outcomes(report: Any) -> dict[tuple[str, int], str]:
    return {(call.place[0], call.place[1]): call.outcome for call in report.calls}


def debating() -> ChoreoGraph:
    return debate(NOTES, rounds=2, system="Agents read their notes and answer the question.", sampling=FREE)


def test_nothing_changed_is_taken_and_no_step_samples(
    make_engine: MakeEngine, tmp_path: Path, stats: list[Any]
) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), debating(), path)
    report = fork(app, path, set={})
    assert {call.outcome for call in report.calls} == {"taken"} and report.changed == ()
    assert (report.sampled, report.taken) == (0, 24) and report.given == 2 and report.ran == ()
    assert stats[0].decode_rows == 0 and stats[0].steps < len(report.calls) * 6
    said = [call.words for call in sorted(read_recording(path).calls(), key=lambda each: each.place[1::-1])]
    assert [str(message.text) for message in report.values["messages"][1:]] == said


def test_only_what_can_be_influenced_is_computed(
    make_engine: MakeEngine, embedded: LoadedModel, tmp_path: Path, drawn: Counter[str]
) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(embedded, kv_budget_bytes=1 << 25), debating(), path)
    drawn.clear()
    report = fork(app, path, set={"alice.system": "Ann has 9 old lamps."}, run="tools")
    found = outcomes(report)
    assert found["bruno", 1] == "taken", "who has not heard her yet"
    assert found["alice", 1] == "changed" and found["bruno", 2] in ("same", "changed")
    assert report.sampled == drawn["tokens"] == 18 and report.taken == 6
    assert {call.place[0] for call in report.changed} <= {"alice", "bruno"}
    assert report.ran == ("moderator", "moderator") and report.route is None
    changed = next(call for call in report.changed if call.place[:2] == ("alice", 1))
    assert changed.recorded != changed.words


def test_before_the_place_everything_stays_as_it_was_said(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), debating(), path)
    report = fork(app, path, at="alice:2", set={"alice.system": "Ann has 9 old lamps."}, run="moderator")
    found = outcomes(report)
    assert (found["alice", 1], found["bruno", 1]) == ("taken", "taken")
    assert found["alice", 2] != "taken" and (report.given, report.ran) == (1, ("moderator",))


def test_a_message_is_set(make_engine: MakeEngine, tmp_path: Path, drawn: Counter[str]) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), debating(), path)
    drawn.clear()
    report = fork(app, path, set={"alice:1.words": "Ann has a bag."}, run=("moderator",))
    found = outcomes(report)
    assert found["alice", 1] == "set" and found["bruno", 1] == "taken"
    assert found["alice", 2] != "taken" and found["bruno", 2] != "taken"
    assert report.values["messages"][1].text == "Ann has a bag."
    assert drawn["tokens"] == report.sampled == 12


def test_another_seed_is_for_those_who_draw(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    graph = ChoreoGraph().add_node(Agent("greedy", sampling=Sampling(max_tokens=6, stop_tokens=())))
    graph.add_node(Agent("free", sampling=FREE)).add_node(Agent("own", sampling=FREE.model_copy(update={"seed": 3})))
    graph.add_edge(START, "greedy").add_edge(START, "free").add_edge(START, "own")
    app = recorded(make_engine(), graph, path)
    report = fork(app, path, set={"run.seed": 99})
    assert {author: outcome for (author, _), outcome in outcomes(report).items()} == {
        "greedy": "taken",
        "own": "taken",
        "free": "changed",
    }
    assert outcomes(fork(app, path, set={"run.seed": 5}))["free", 1] == "taken"


def test_another_input(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), debating(), path)
    report = fork(app, path, set={"input": "Where are the kites?"}, run="tools")
    assert "taken" not in {call.outcome for call in report.calls}
    assert report.values["messages"][0].text == "Where are the kites?"
    whole = fork(app, path, set={"input": {"messages": [("user", "Who?"), ("user", "Why?")]}}, run="tools")
    assert [message.text for message in whole.values["messages"][:2]] == ["Who?", "Why?"]


def test_another_prompt(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Of an agent, and of a worker whose instances are sent without instructions."""
    worker = Worker("worker", prompt="Write.", sampling=FREE)
    graph = ChoreoGraph().add_node(Agent("ann", prompt="Tell.", sampling=FREE)).add_node(worker)
    graph.add_edge(START, "ann").add_edge("ann", "worker", visibility={})
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), graph, path)
    assert outcomes(fork(app, path, set={"ann.prompt": "Tell."}))["ann", 1] == "taken"
    report = fork(app, path, set={"worker.prompt": "Write more."})
    assert outcomes(report) == {("ann", 1): "taken", ("worker", 2): report.calls[-1].outcome}
    assert report.calls[-1].outcome != "taken"


def test_a_function_is_run_only_where_it_may_be(make_engine: MakeEngine, tmp_path: Path) -> None:
    executions.clear()
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), looking(), path)
    change = {"ann:1.words": "Ann has a bag."}
    with pytest.raises(ReplayError, match=r"the function 'look' would have to be run: its input in step 2 is not as"):
        fork(app, path, set=change)
    assert executions["look"] == 1
    assert fork(app, path, set={}).given == 1 and executions["look"] == 1
    report = fork(app, path, set=change, run="look")
    assert executions["look"] == 2 and report.ran == ("look",)


def test_a_tool_whose_call_is_as_recorded_is_not_run(make_engine: MakeEngine, tmp_path: Path) -> None:
    executions.clear()
    path, engine = tmp_path / "run.jsonl", make_engine(load_model(save_caller(tmp_path / "m")), kv_budget_bytes=1 << 25)
    app = recorded(engine, calling(), path)
    report = fork(app, path, set={"bob.system": "You are Bob."})
    assert executions["count"] == 1 and report.given == 1
    assert outcomes(report)["ann", 1] == "taken" and outcomes(report)["bob", 3] != "taken"


def test_a_route_that_changes_is_shown_with_what_follows(make_engine: MakeEngine, tmp_path: Path) -> None:
    executions.clear()
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), routing(), path)
    said = {call.author for call in read_recording(path).calls()}
    taken, other = ("bob", "cleo") if "bob" in said else ("cleo", "bob")
    words = "B." if other == "bob" else "x."
    report = fork(app, path, set={"ann:1.words": words}, run="tools")
    assert report.route is not None
    assert (report.route.after, report.route.recorded, report.route.now) == (("routed",), (taken,), (other,))
    assert report.route.follows == (("last",),)
    assert [call.outcome for call in report.calls if call.place[0] == other] == ["new"]
    assert [place[0] for place in report.gone] == [taken]


def test_a_later_run_of_a_thread_is_forked(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "t"}}
    with engine.record(path):
        app.invoke(QUESTION, config)
        app.invoke({"messages": [("user", "And now?")]}, config)
    report = fork(app, path, at="ann:2", set={"input": "And then?"}, run="tools")
    assert [call.outcome for call in report.calls if call.run == 0] == ["taken", "taken"]
    assert "taken" not in {call.outcome for call in report.calls if call.run == 1}
    texts = [message.text for message in report.values["messages"]]
    assert "And then?" in texts and "And now?" not in texts and QUESTION["messages"][0][1] in texts
    assert len(app.get_state(config).values["messages"]) == 8


def test_agents_of_subgraphs_are_told_otherwise(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    graph = ChoreoGraph().add_node("team", looking().compile(engine=engine))
    graph.add_node(Agent("judge", sampling=FREE, reads={"team": "shared"}))
    app = recorded(engine, graph.add_edge(START, "team").add_edge("team", "judge", visibility={}), path)
    report = fork(app, path, set={"team|bob.system": "You are Bob."})
    found = {author: outcome for (author, _), outcome in outcomes(report).items()}
    assert found["team|ann"] == "taken" and found["team|bob"] != "taken" and found["judge"] != "taken"


async def test_the_async_form(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), debating(), path)
    assert (await afork(app, path, set={})).sampled == 0


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"set": {"alice.mood": "good"}}, "a fork can set run.seed, input, NODE.system"),
        ({"set": {"carl.system": "x"}}, "no agent or persona of the graph is named 'carl'"),
        ({"set": {"run.seed": "x"}}, "run.seed must be an integer"),
        ({"set": {}, "at": "alice"}, "name a call as NODE:NUMBER"),
        ({"set": {}, "at": "carl:1"}, "'carl' does not speak"),
        ({"set": {}, "at": "alice:9"}, "'alice' speaks 2 times"),
        ({"set": {"alice:0.words": "x"}}, "name a call as NODE:NUMBER"),
    ],
    ids=str,
)
def test_what_cannot_be_set_is_said(make_engine: MakeEngine, tmp_path: Path, asked: Any, says: str) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), debating(), path)
    with pytest.raises(InvalidRequestError, match=says):
        fork(app, path, **asked)


def test_without_the_key_nothing_is_known_to_be_as_recorded(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    app = recorded(make_engine(), debating(), path)
    (tmp_path / "run.jsonl.key").unlink()
    with pytest.raises(ReplayError, match=r"no run\.jsonl\.key"):
        fork(app, path, set={})


def test_an_interrupt_is_resumed_in_a_fork(make_engine: MakeEngine, tmp_path: Path) -> None:
    from langgraph.types import interrupt

    def ask(state: Any) -> dict[str, Any]:
        return {"messages": [("user", f"They said {interrupt('Which?')}.")]}

    graph = ChoreoGraph().add_node(Agent("ann", sampling=FREE)).add_node("ask", ask)
    graph.add_node(Agent("bob", sampling=FREE, reads={"ann": "shared", "ask": "shared"}))
    graph.add_edge(START, "ann").add_edge("ann", "ask", visibility={}).add_edge("ask", "bob")
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = graph.compile(InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "t"}}
    with engine.record(path):
        app.invoke(QUESTION, config)
        app.invoke(Command(resume="red"), config)
    report = fork(app, path, at="bob:1", set={"input": Command(resume="blue")}, run="ask")
    assert {author: outcome == "taken" for (author, _), outcome in outcomes(report).items()} == {
        "ann": True,
        "bob": False,
    }
    assert "They said blue." in [message.text for message in report.values["messages"]]


def test_a_fork_is_recorded_as_it_went(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path, forked = make_engine(), tmp_path / "run.jsonl", tmp_path / "fork.jsonl"
    app = reading().compile(engine=engine)
    with engine.record(path):
        app.invoke(QUESTION)
    report = fork(app, path, set={"ann:1.words": "None."}, run="look", record=forked)
    recording = read_recording(forked)
    assert recording.cut is None and engine.record.under_way is None
    assert [(call.place[0], call.words) for call in report.calls] == [
        (call.author, call.words) for call in sorted(recording.calls(), key=lambda call: (call.superstep, call.author))
    ]
    assert [(node.node, node.outcome) for node in recording.nodes()] == [("look", "result")] and report.ran == ("look",)
    with pytest.raises(InvalidRequestError, match="is there"):
        fork(app, path, set={"ann:1.words": "None."}, run="look", record=forked)
    assert replay(app, path).same


def test_interrupts_of_a_fork_are_recorded_too(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path, forked = make_engine(), tmp_path / "run.jsonl", tmp_path / "fork.jsonl"
    graph = ChoreoGraph().add_node(Agent("ann", sampling=FREE))
    graph.add_node("ask", lambda _: {"messages": [AIMessage(interrupt("How many?"))]})
    graph.add_edge(START, "ann").add_edge("ann", "ask", visibility={}).add_edge("ask", END)
    app = graph.compile(InMemorySaver(), engine=engine)
    thread: Any = {"configurable": {"thread_id": "1"}}
    with engine.record(path):
        app.invoke(QUESTION, thread)
        app.invoke(Command(resume="Three."), thread)
    fork(app, path, set={"run.seed": 9}, run="tools", record=forked)
    outcomes = [[node.outcome for node in read_recording(each).nodes()] for each in (path, forked)]
    assert outcomes == [["interrupt", "result"]] * 2
    assert [read_recording(forked).ended(run).outcome for run in (0, 1)] == ["interrupted", "done"]  # type: ignore[union-attr]


def test_what_a_fork_changed_is_a_table_in_notebooks_and_text_in_it_is_text(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine, path, bad = make_engine(), tmp_path / "run.jsonl", "<img src=x onerror=alert(1)>"
    app = recorded(engine, reading(), path)
    changed = fork(app, path, set={"ann:1.words": bad}, run="look")._repr_html_()
    assert bad not in changed and "&lt;img src=x" in changed
    assert "the same as recorded" in replay(app, path)._repr_html_()
