"""Recordings that were stopped, answered twice, forged or not written: what is played of them, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt
from support.recorded import FREE, QUESTION, looking

from choreo_agents import START, Agent, ChoreoGraph, Command, RunOptions, fork, replay
from choreo_agents.engine.recording import read_recording
from choreo_agents.errors import InvalidRequestError, ReplayError

THREAD: Any = {"configurable": {"thread_id": "t"}}


def speaking(function: Any) -> ChoreoGraph:
    """Ann, a function and Bob."""
    graph = ChoreoGraph(visibility="shared").add_node("function", function)
    graph.add_node(Agent("ann", sampling=FREE)).add_node(Agent("bob", sampling=FREE))
    return graph.add_edge(START, "ann").add_edge("ann", "function").add_edge("function", "bob")


def test_a_function_that_asks_twice_is_answered_twice(make_engine: MakeEngine, tmp_path: Path) -> None:
    asked = []

    def ask(_: Any) -> dict[str, Any]:
        asked.append("?")
        return {"messages": [AIMessage(f"{interrupt('Which?')} and {interrupt('How many?')}")]}

    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = speaking(ask).compile(InMemorySaver(), engine=engine)
    with engine.record(path):
        app.invoke(QUESTION, THREAD)
        app.invoke(Command(resume="kites"), THREAD)
        app.invoke(Command(resume="three"), THREAD)
    assert len(asked) == 3
    report = replay(app, path)
    assert report.same and [call.run for call in report.calls] == [0, 2], report
    assert len(asked) == 3


async def test_a_run_that_is_cancelled_is_played_up_to_there(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path, begun = make_engine(), tmp_path / "run.jsonl", asyncio.Event()

    async def wait(_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    app = speaking(wait).compile(engine=engine)
    with engine.record(path):
        run = asyncio.create_task(app.ainvoke(QUESTION))
        await begun.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    ended = read_recording(path).ended(0)
    assert ended is not None and (ended.outcome, ended.error) == ("left", None)
    report = await asyncio.to_thread(replay, app, path)
    assert report.same and [call.place[0] for call in report.calls] == ["ann"], report


def test_a_run_that_stops_before_every_node_is_played_so(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = speaking(lambda _: {}).compile(InMemorySaver(), engine=engine)
    with engine.record(path):
        app.invoke(QUESTION, THREAD, interrupt_before="*")
        app.invoke(None, THREAD, interrupt_before="*")
        app.invoke(None, THREAD)
    assert [run.interrupts for run in read_recording(path).runs] == [{"interrupt_before": ["*"]}] * 2 + [{}]
    report = replay(app, path)
    assert report.same and [call.run for call in report.calls] == [1, 2], report


def test_a_recording_that_cannot_begin_leaves_nothing_behind(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    (tmp_path / "run.jsonl.key").write_text("of another")
    with pytest.raises(InvalidRequestError, match="is there already"), engine.record(path):
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


def test_one_tenant_at_a_time_records_bits(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The steps of whoever came first would be missing."""
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(engine=engine)
    with engine.record(path, bits=True):
        other = engine.tenant("other")
        with pytest.raises(InvalidRequestError, match="another tenant"), other.record(tmp_path / "other", bits=True):
            pass
        app.invoke(QUESTION)
    assert len(read_recording(path).steps()) == engine.stats().steps > 0
    assert not (tmp_path / "other").exists()


Forging = Callable[[dict[str, dict[str, Any]]], Any]


def forged(path: Path, forge: Forging) -> None:
    """Change the first line of each kind."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    forge({line["kind"]: line for line in reversed(lines)})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (lambda lines: lines["header"].update(format=4, unheard="of"), "has format 4"),
        (lambda lines: lines["header"]["conditions"].pop("model"), "is no recording"),
        (lambda lines: lines["header"]["conditions"].update(threads="many"), "is no recording"),
        (lambda lines: lines["run"].update(interrupts={"input": ["x"]}), "line 2 .* is damaged"),
        (lambda lines: lines["run"].update(given="msgpack:gqFh"), "is damaged, and cannot be read"),
        (lambda lines: lines["run"].update(given="pickle:gASVCQ=="), "packed as 'pickle' is not read"),
    ],
)
def test_a_forged_recording_is_refused(make_engine: MakeEngine, tmp_path: Path, forge: Forging, says: str) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(engine=engine)
    with engine.record(path):
        app.invoke(QUESTION)
    forged(path, forge)
    with pytest.raises(InvalidRequestError, match=says):
        replay(app, path)


@pytest.mark.parametrize("token", [-1, 10**9, 10**30])
def test_tokens_that_are_not_the_models_reach_no_engine(make_engine: MakeEngine, tmp_path: Path, token: int) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(engine=engine)
    with engine.record(path, bits=True):
        app.invoke(QUESTION)
    forged(path, lambda lines: lines["call"].update(tokens=[token]))
    for expect in ("words", "bits"):
        report = replay(app, path, expect)  # type: ignore[arg-type]
        assert not report.same and "its tokens are not the model's" in report.differences[0]
    with pytest.raises(ReplayError, match="its tokens are not the model's"):
        fork(app, path, set={"run.seed": 3})


def test_words_are_compared_beside_tokens(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The same tokens may be other words: of another tokenizer, or in a file that was edited."""
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(engine=engine)
    with engine.record(path):
        app.invoke(QUESTION)
    forged(path, lambda lines: lines["call"].update(words="zirconium"))
    ann, bob = replay(app, path).calls
    assert ann.difference is not None and "recorded 'zirconium'" in ann.difference and bob.difference is None


def test_another_seed_is_for_agents_that_a_function_calls(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    inner = ChoreoGraph().add_node(Agent("ida", sampling=FREE)).add_edge(START, "ida").compile(engine=engine)

    def ask(_: Any) -> dict[str, Any]:
        return {"messages": [AIMessage(inner.invoke(QUESTION)["messages"][-1].text)]}

    app = speaking(ask).compile(engine=engine)

    def said(seed: int) -> list[str]:
        config: Any = {"configurable": {"choreo": RunOptions(seed=seed)}}
        return [message.text for message in app.invoke(QUESTION, config)["messages"]]

    with engine.record(path):
        first = said(1)
    assert first[2] != said(2)[2]
    with pytest.raises(ReplayError, match="it calls agents itself"):
        fork(app, path, set={"run.seed": 2})
    report = fork(app, path, set={"run.seed": 2}, run="tools")
    assert [message.text for message in report.values["messages"]] == said(2)
    kept = fork(app, path, set={"run.seed": 2}, at="bob:1").values["messages"]
    assert [message.text for message in kept][:3] == first[:3]


def test_a_thread_that_was_changed_between_two_runs_is_not_forked(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = speaking(lambda _: {}).compile(InMemorySaver(), engine=engine)
    with engine.record(path):
        app.invoke(QUESTION, THREAD)
        app.invoke({"messages": [("user", "And Bob?")]}, THREAD)
    assert len(fork(app, path, set={"run.seed": 2}, run="tools").calls) == 4
    other: Any = {"configurable": {"thread_id": "other"}}
    with engine.record(tmp_path / "changed"):
        app.invoke(QUESTION, other)
        app.update_state(other, {"messages": [HumanMessage("Bob has 5 boats.")]})
        app.invoke({"messages": [("user", "And Bob?")]}, other)
    with pytest.raises(ReplayError, match="'other' was changed before run 2"):
        fork(app, tmp_path / "changed", set={"run.seed": 2}, run="tools")


def test_a_recording_that_is_cut_anywhere_is_forked_up_to_there(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(InMemorySaver(), engine=engine)
    with engine.record(path):
        app.invoke(QUESTION, THREAD)
    lines = path.read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in lines]
    others = [kind for kind in kinds if kind not in ("message", "memory")]
    assert others == ["header", "run", "call", "node", "call", "ran", "end"]
    for end in range(2, len(lines)):
        path.write_bytes(b"".join(lines[:end]) + lines[end][:5])
        report = fork(app, path, set={"bob.system": "Bob likes boats."})
        assert len(report.calls) == kinds[:end].count("call") and "is not whole" in report.notes[0]


def test_a_run_that_was_left_is_noted_in_its_fork(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(engine=engine)
    with engine.record(path):
        for _ in app.stream(QUESTION):
            break
    [note] = fork(app, path, set={"bob.system": "Bob likes boats."}).notes
    assert note == "nobody waited for the end of run 1: forked up to there"


def test_states_that_cannot_be_compared_are_noted(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(engine=engine)
    with engine.record(path):
        app.invoke(QUESTION)
    (tmp_path / "run.jsonl.key").unlink()
    [note] = replay(app, path).notes
    assert note == "states were not compared: there is no run.jsonl.key beside the recording"
