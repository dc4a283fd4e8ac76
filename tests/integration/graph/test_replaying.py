"""Recorded runs that are made again: calls say what they said, functions run, and what differs is named."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.types import interrupt
from support.adapters import save_adapter
from support.recorded import FREE, QUESTION, THREAD, calling, executions, looking, outcomes, recorded, save_caller

from choreo_agents import START, Agent, ChoreoGraph, Command, Engine, Sampling, Send, Worker, areplay, fork, replay
from choreo_agents.engine.recording.format import read_recording
from choreo_agents.errors import InvalidRequestError, ReplayError
from choreo_agents.graph.view.view import call_of
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.workflows import debate, tree_of_thoughts

LONGER = Sampling(temperature=1.0, max_tokens=14)
AGAIN = {"messages": [("user", "And now?")]}


def debating(_: Engine) -> ChoreoGraph:
    notes = {"alice": "Ann has 3 red kites.", "bruno": "Ann has 7 blue cups.", "clara": None}
    return debate(notes, rounds=2, system="Agents read their notes.", sampling=FREE)


def thinking(_: Engine) -> ChoreoGraph:
    return tree_of_thoughts(
        branches=3, voters=2, depth=2, think="Think.", go_on="Go on.", vote="Vote.", answer="Answer.", sampling=LONGER
    )


def working(_: Engine) -> ChoreoGraph:
    worker = Worker("worker", n=2, sampling=LONGER)

    def route(state: Any) -> list[Send]:
        return [worker.send(state, f"Write part {part}.") for part in (1, 2, 3)]

    return ChoreoGraph().add_node(worker).add_conditional_edges(START, route, ["worker"])


def teams(engine: Engine) -> ChoreoGraph:
    """The same subgraph in two branches, whose calls have the same names."""

    def route(_: Any) -> list[Send]:
        return [Send("team", {"messages": [("user", f"Look at box {box}.")]}) for box in (1, 2)]

    graph = ChoreoGraph().add_node("team", looking().compile(engine=engine))
    graph.add_node(Agent("judge", sampling=FREE, reads={"team": "shared", START: "shared"}))
    return graph.add_conditional_edges(START, route, ["team"]).add_edge("team", "judge", visibility={})


def plain(engine: Engine) -> ChoreoGraph:
    """A graph of LangGraph's own as a node, with an agent."""
    inner = StateGraph(MessagesState).add_node("ida", Agent("ida", engine=engine, sampling=FREE)).add_edge(START, "ida")
    graph = ChoreoGraph().add_node("inner", inner.compile()).add_node(Agent("bob", sampling=FREE))
    return graph.add_edge(START, "inner").add_edge("inner", "bob")


def asking(engine: Engine, *questions: Any, confidential: bool = False) -> ChoreoGraph:
    """A function that runs a graph, once for each question."""
    ida = Agent("ida", confidential=confidential, sampling=FREE)
    inner = ChoreoGraph().add_node(ida).add_edge(START, "ida").compile(engine=engine)

    def ask(_: Any) -> dict[str, Any]:
        executions["ask"] += 1
        said = [inner.invoke(asked)["messages"][-1].text for asked in questions or (QUESTION, AGAIN)]
        return {"messages": [AIMessage(f"They said {', '.join(said)}.")]}

    graph = ChoreoGraph().add_node("ask", ask).add_node(Agent("bob", sampling=FREE))
    return graph.add_edge(START, "ask").add_edge("ask", "bob")


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_caller(tmp_path_factory.mktemp("caller")))


@pytest.mark.parametrize(
    ("make", "calls", "functions"),
    [
        (debating, 6, {}),
        (thinking, 11, {}),
        (working, 6, {}),
        (teams, 5, {"look": 2}),
        (plain, 2, {}),
        (asking, 3, {"ask": 1}),
        (lambda _: calling(), 2, {"count": 1}),
    ],
    ids=["debate", "tree of thoughts", "workers", "subgraphs", "LangGraph's own", "called", "tools"],
)
def test_no_step_samples_what_was_said(
    make_engine: MakeEngine, caller: LoadedModel, tmp_path: Path, make: Any, calls: int, functions: dict[str, int]
) -> None:
    """Functions run; and the engine has afterwards what it had."""
    engine = make_engine(caller, kv_budget_bytes=1 << 25) if "count" in functions else make_engine()
    graph, path = make(engine), tmp_path / "run.jsonl"
    app = recorded(engine, graph, path)
    executions.clear()
    said, before = read_recording(path).calls(), engine.stats()
    for report in (replay(app, path), fork(app, path, set={})):
        assert report.same and report.changed == () and report.notes == (), report
        assert len(report.calls) == len(said) == calls and {call.outcome for call in report.calls} == {"taken"}
        assert (report.sampled, report.taken) == (0, sum(call.sampled for call in said))
        assert sorted(call.words or "" for call in report.calls) == sorted(call.text or "" for call in said)
    after = engine.stats()
    assert after.decode_rows == before.decode_rows
    assert (after.messages, after.leases) == (before.messages, before.leases)
    assert executions == {name: 2 * times for name, times in functions.items()}


def test_what_branches_of_a_subgraph_are_told_and_say_stands_in_one_order(make_engine: MakeEngine) -> None:
    """Not in that of ids, which are drawn at random: what reads it would be asked something else in every run."""
    engine = make_engine()
    state = teams(engine).compile(engine=engine).invoke(QUESTION)
    places = [repr((entry["superstep"], call_of(entry))) for entry in state["handles"]]
    assert len({*places}) == len(places) == 10


async def test_the_async_form(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = debating(engine).compile(engine=engine)
    with engine.record(path):
        await app.ainvoke(QUESTION)
    told: list[tuple[int, int]] = []
    reports = [
        await areplay(app, path, progress=lambda done, of: told.append((done, of))),
        await asyncio.to_thread(replay, app, path),
    ]
    assert all(report.same and report.sampled == 0 for report in reports) and told == [(1, 1)]


def altered(change: str) -> ChoreoGraph:
    """`looking`, with one thing other than it was."""
    graph = looking()
    ann, bob = graph.nodes["ann"].runnable, graph.nodes["bob"].runnable
    assert isinstance(ann, Agent) and isinstance(bob, Agent)
    if change == "system":
        return graph.with_system("ann", "Ann has 7 blue cups.")
    if change == "sampling":
        bob.sampling = FREE.model_copy(update={"temperature": 0.5})
    elif change == "turn":
        bob.assistant_prefix = "Robert"
    return graph


@pytest.mark.parametrize(
    ("change", "ann", "bob"),
    [
        ("system", ("view (__start__, ann.system)",), ("view (ann)",)),
        ("sampling", (), ("sampling",)),
        ("turn", (), ("turn",)),
        ("seed", ("seed",), ("view (ann)", "seed")),
        ("function", (), ("view (look)",)),
    ],
)
def test_what_differs_is_named(make_engine: MakeEngine, tmp_path: Path, change: str, ann: Any, bob: Any) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    recorded(engine, looking(), path)
    app, nodes = altered(change).compile(engine=engine), {}
    if change == "function":
        nodes = {"look": lambda _: {"looks": 1, "messages": [AIMessage("Ann has a box.")]}}
    report = fork(app, path, set={"run.seed": 9}) if change == "seed" else replay(app, path, nodes=nodes)
    assert [call.differs for call in report.calls] == [ann, bob]
    assert not report.same and [call.same for call in report.calls] == [not ann, not bob]
    for call in report.calls:
        assert call.outcome == ("taken" if call.same else "same" if call.words == call.recorded else "changed")
        assert (call.sampled > 0) == bool(call.differs)


def test_another_adapter_of_the_same_name_is_another_model(
    make_engine: MakeEngine, tiny_path: Path, tmp_path: Path
) -> None:
    engines = [make_engine(salt="s"), make_engine(salt="s")]
    for seed, engine in enumerate(engines):
        engine.load_adapter(save_adapter(tmp_path / str(seed), tiny_path, seed=seed), "fine")
    graph = ChoreoGraph().add_node(Agent("ann", adapter="fine", sampling=FREE, reads={START: "private"}))
    one, other = (graph.add_edge(START, "ann", visibility={}).compile(engine=engine) for engine in engines)
    path = tmp_path / "run.jsonl"
    with engines[0].record(path):
        one.invoke(QUESTION)
    assert replay(one, path).same
    [call] = replay(other, path).calls
    assert call.differs == ("model",) and call.sampled


def test_functions_are_replaced_in_subgraphs_too(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = recorded(engine, teams(engine), path)
    executions.clear()
    seen: list[Any] = []

    def replaced(state: Any) -> dict[str, Any]:
        seen.append(state["messages"][-1].name)
        return {"looks": 1, "messages": [AIMessage("Ann has a bag.")]}

    assert replay(app, path, nodes={"team|look": replaced}).same
    assert seen == ["ann", "ann"] and not executions
    for name in ("look", "team|lok", "team"[:3]):
        with pytest.raises(InvalidRequestError, match="nothing named"):
            replay(app, path, nodes={name: replaced})


def interrupted() -> ChoreoGraph:
    """Ann, a function that asks twice, and Bob."""

    def ask(_: Any) -> dict[str, Any]:
        executions["ask"] += 1
        return {"messages": [AIMessage(f"{interrupt('Which?')} and {interrupt('How many?')}")]}

    graph = ChoreoGraph(visibility="shared").add_node(Agent("ann", sampling=FREE)).add_node("ask", ask)
    graph.add_node(Agent("bob", sampling=FREE))
    return graph.add_edge(START, "ann").add_edge("ann", "ask").add_edge("ask", "bob")


def test_interrupts_are_resumed_as_they_were_in_a_thread_of_the_replays_own(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = interrupted().compile(InMemorySaver(), engine=engine)
    with engine.record(path):
        given: Any
        for given in (QUESTION, Command(resume="kites"), Command(resume="three"), AGAIN):
            state = app.invoke(given, THREAD)
        app.invoke(Command(resume="boats"), THREAD, interrupt_before="*")
    recording = read_recording(path)
    ends = [ended and ended.outcome for ended in map(recording.ended, range(5))]
    assert ends == ["interrupted", "interrupted", "done", "interrupted", "interrupted"]
    asked = ["interrupt", "interrupt", "result", "interrupt", "interrupt"]
    assert [node.outcome for node in recording.nodes()] == asked
    before, history = engine.stats(), [*app.get_state_history(THREAD)]
    executions.clear()
    for _ in range(2):
        report = replay(app, path)
        assert report.same and report.sampled == 0 and [call.run for call in report.calls] == [0, 2, 3], report
        assert [message.text for message in report.values["messages"]] == [each.text for each in state["messages"]]
    assert executions["ask"] == 10
    assert [*app.get_state_history(THREAD)] == history, "the graph's own thread stays as it is"
    after = engine.stats()
    assert (after.messages, after.leases) == (before.messages, before.leases)
    other = fork(app, path, set={"ann:1.words": "Ann has a bag."})
    assert outcomes(other)["ann:1"] == "set" and outcomes(other)["bob:1"] != "taken"
    assert "kites and three" in [message.text for message in other.values["messages"]]


def test_an_error_that_was_recorded_comes_again_and_no_other(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"

    def failing(_: Any) -> dict[str, Any]:
        raise ValueError("zirconium")

    failed = ChoreoGraph().add_node(Agent("ann", sampling=FREE)).add_node("fails", failing)
    app = failed.add_edge(START, "ann").add_edge("ann", "fails", visibility={}).compile(engine=engine)
    with engine.record(path), pytest.raises(ValueError, match="zirconium"):
        app.invoke(QUESTION)
    before = engine.stats().messages
    report = replay(app, path)
    assert report.same and outcomes(report) == {"ann:1": "taken"}

    def otherwise(_: Any) -> None:
        raise LookupError("silver")

    with pytest.raises(LookupError, match="silver"):
        replay(app, path, nodes={"fails": otherwise})
    mended = replay(app, path, nodes={"fails": lambda _: {}})
    assert not mended.same and mended.differences == ("run 1 ended otherwise: failed in the record, done now",)
    assert engine.stats().messages == before


def test_masked_calls_of_one_place_are_compared_with_what_each_was_asked(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = recorded(engine, asking(engine, confidential=True), path)
    report = replay(app, path)
    assert report.same and outcomes(report) == {"ask|ida:1": "same", "ask|ida:2": "same", "bob:1": "taken"}, report
    once = replay(asking(engine, AGAIN, confidential=True).compile(engine=engine), path)
    assert once.missing == (("ask|ida", 1, 0, 0),) and not once.same


@pytest.mark.parametrize("confidential", [False, True])
def test_masked_calls_are_decoded_again_and_compared_by_digests(
    make_engine: MakeEngine, embedded: LoadedModel, tmp_path: Path, confidential: bool
) -> None:
    engine, path = make_engine(embedded, kv_budget_bytes=1 << 25), tmp_path / "run.jsonl"
    app = recorded(engine, looking(confidential=True), path, confidential=confidential)
    report = replay(app, path)
    ann = report.calls[0]
    assert report.same and outcomes(report) == {"ann:1": "taken" if confidential else "same", "bob:1": "taken"}
    assert report.sampled == (0 if confidential else 6) and ann.words is None
    assert (ann.recorded is None) != confidential
    assert any("are masked" in note for note in report.notes) != confidential
    other = looking(confidential=True).with_system("ann", "Ann has 7 blue cups.").compile(engine=engine)
    assert outcomes(replay(other, path))["ann:1"] == "changed"
    (tmp_path / "run.jsonl.key").unlink()
    with pytest.raises(ReplayError, match=r"run\.jsonl\.key is missing"):
        replay(app, path)


def test_what_cannot_be_begun_again_is_refused(make_engine: MakeEngine, embedded: LoadedModel, tmp_path: Path) -> None:
    engine = make_engine()
    app = looking().compile(InMemorySaver(), engine=engine)
    app.invoke(QUESTION, THREAD)
    with engine.record(tmp_path / "late"):
        app.invoke(QUESTION, THREAD)
    with pytest.raises(ReplayError, match="continues thread 't', which began before the recording"):
        replay(app, tmp_path / "late")
    with engine.record(tmp_path / "travels"):
        app.invoke(None, [*app.get_state_history(THREAD)][2].config)
    with pytest.raises(ReplayError, match="continues from an earlier checkpoint"):
        replay(app, tmp_path / "travels")
    recorded(engine, looking(), tmp_path / "model")
    with pytest.raises(ReplayError, match="the recording was made with the model"):
        replay(looking().compile(engine=make_engine(embedded, kv_budget_bytes=1 << 25)), tmp_path / "model")


def test_what_was_changed_between_two_runs_is_a_difference(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = interrupted().compile(InMemorySaver(), engine=engine, interrupt_before=["ask"])
    with engine.record(path):
        app.invoke(QUESTION, THREAD)
        app.update_state(THREAD, {"messages": [AIMessage("Zirconium.", name="ask")]}, as_node="ask")
        app.invoke(None, THREAD)
    report = replay(app, path, nodes={"ask": lambda _: {"messages": [AIMessage("Silver.")]}})
    bob = report.calls[-1]
    assert not report.same and bob.place[0] == "bob" and bob.differs == ("view (__start__, ask)",)


async def test_a_run_that_was_cancelled_or_left_is_made_again_up_to_there(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine, path, begun = make_engine(), tmp_path / "run.jsonl", asyncio.Event()

    async def wait(_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    app = looking().compile(engine=engine)
    waiting = altered("").add_node("wait", wait).add_edge("bob", "wait", visibility={}).compile(engine=engine)
    with engine.record(path):
        run = asyncio.create_task(waiting.ainvoke(QUESTION))
        await begun.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        async for _ in app.astream(QUESTION):
            break
        await app.ainvoke(AGAIN)
    ends = [ended and ended.outcome for ended in map(read_recording(path).ended, range(3))]
    assert ends == ["left", "left", "done"]
    report = await areplay(app, path)
    assert report.same and [call.run for call in report.calls] == [0, 0, 1, 2, 2], report
    assert report.notes == ("run 1, 2 was not awaited to its end: it was replayed up to there",)


def test_a_recording_that_is_cut_anywhere_is_run_again_up_to_there(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(InMemorySaver(), engine=engine)
    with engine.record(path):
        app.invoke(QUESTION, THREAD)
    before, lines = engine.stats(), path.read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in lines]
    others = [kind for kind in kinds if kind not in ("message", "memory", "step")]
    assert others == ["header", "run", "call", "node", "call", "ran", "end"]
    for end in range(2, len(lines)):
        path.write_bytes(b"".join(lines[:end]) + lines[end][:5])
        for report in (replay(app, path), fork(app, path, set={"bob.system": "Bob likes boats."})):
            assert len(report.calls) == kinds[:end].count("call") and "is incomplete" in report.notes[0]
            assert report.missing == () and [call.outcome for call in report.calls[:1]] in ([], ["taken"])
    after = engine.stats()
    assert (after.messages, after.leases) == (before.messages, before.leases)
