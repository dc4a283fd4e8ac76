"""What a recording has of the runs of a block, and what it has not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx
from conftest import MakeEngine
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from support.recorded import FREE, QUESTION, looking
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama

from choreo_agents import START, Agent, ChoreoGraph, Engine, Memory, MessageHandle, RunOptions, replay
from choreo_agents.engine.recording.format import (
    RecordedCall,
    RecordedMemory,
    RecordedMessage,
    RecordedNode,
    RecordedStep,
    read_recording,
)
from choreo_agents.errors import InvalidRequestError, ReplayError, ThreadBusyError
from choreo_agents.models import load_model


def test_a_run_is_written_down(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(seed=3), tmp_path / "run.jsonl"
    app = looking().compile(engine=engine)
    app.invoke(QUESTION)  # before the block: no part of it
    with engine.record(path):
        state = app.invoke(QUESTION, {"configurable": {"choreo": RunOptions(seed=4)}})
    app.invoke(QUESTION)
    recording = read_recording(path)
    assert recording.cut is None and len(recording.runs) == 1
    header, [run] = recording.header, recording.runs
    assert (header.seed, header.method, header.keyed, header.confidential) == (3, "choreo", "file", False)
    assert header.fingerprint == engine.model.adapter.fingerprint
    assert (run.seed, run.thread, run.kept) == (4, None, False) and run.input is not None
    ended = recording.ended(0)
    assert ended is not None and ended.outcome == "done"
    ann, bob = recording.calls()
    said = {message.name: message for message in state["messages"]}
    for call in (ann, bob):
        entry = next(each for each in state["handles"] if each["author"] == call.author)
        assert call.place == (call.author, entry["superstep"], entry["branch"], entry["call"])
        assert call.text == said[call.author].text and call.finish_reason == "length"
        assert call.tokens is not None and len(call.tokens) == call.sampled == 6 and not call.is_set
        assert call.request.keys() == {"view", "turn", "model", "sampling", "seed"}
    assert ann.request["model"] == bob.request["model"] and ann.request["view"] != bob.request["view"]
    [node] = recording.nodes()
    assert (node.node, node.step, node.branch, node.outcome) == ("look", 2, 0, "result")
    assert sum(step.rows for step in recording.steps()) >= 12
    assert sum(step.tokens for step in recording.steps()) == sum(call.tokens_encoded for call in (ann, bob))


def test_what_calls_read_and_made_is_named_once_behind_what_it_was_encoded_from(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(engine=engine)
    with engine.record(path):
        app.invoke(QUESTION)
        app.invoke({"messages": [("user", "And what does Bob have?")]})
    known: dict[str, RecordedMessage] = {}
    for line in read_recording(path).lines:
        if isinstance(line, RecordedMessage):
            assert line.name not in known and known.keys() >= set(line.parents)
            known[line.name] = line
        elif isinstance(line, RecordedCall):
            assert line.view_tokens == sum(known[name].tokens for name in line.view)
            assert known[line.answer].parents == line.view and line.thought is None
            assert known[line.answer].tokens >= line.header_tokens + line.sampled
    first, second = (read_recording(path).calls(run) for run in (0, 1))
    assert first[0].answer in first[1].view, "Bob reads what Ann has said"
    shared = set(first[0].view) & set(second[0].view)
    assert {known[name].role for name in shared} == {"system"}, "what all runs are told is one message"
    assert "system" not in {known[name].role for name in set(second[0].view) - shared}


def test_when_calls_and_functions_began_and_ended_is_written_down(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    with engine.record(path):
        looking().compile(engine=engine).invoke(QUESTION)
    recording = read_recording(path)
    [run], [ann, bob], [look] = recording.runs, recording.calls(), recording.nodes()
    ended = recording.ended(0)
    assert ann.first_token_s is not None and bob.first_token_s is not None and ended is not None
    times = [run.at_s, ann.submitted_s, ann.first_token_s, ann.finished_s, look.began_s, look.ended_s]
    times += [bob.submitted_s, bob.first_token_s, bob.finished_s, ended.at_s]
    assert times == sorted(times) and times[0] >= 0


def test_the_file_is_its_users_alone_and_overwrites_nothing(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    before = os.umask(0)
    try:
        with engine.record(path):
            pass
    finally:
        os.umask(before)
    key = tmp_path / "run.jsonl.key"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, key)] == [0o600, 0o600]
    written = path.read_bytes()
    with pytest.raises(InvalidRequestError, match="exists already"), engine.record(path):
        pass
    assert path.read_bytes() == written
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequestError, match="exists already"), engine.record(tmp_path / "link"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_salted_tenants_recording_has_no_key_beside_it(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(salt="s"), tmp_path / "run.jsonl"
    with engine.record(path):
        looking().compile(engine=engine).invoke(QUESTION)
    assert [each.name for each in tmp_path.iterdir()] == ["run.jsonl"]
    with pytest.raises(InvalidRequestError, match="recorded under another salt"):
        replay(looking().compile(engine=make_engine(salt="other")), path)
    app = looking().compile(engine=make_engine(salt="s"))
    assert replay(app, path).same
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(header), "proof": "é"}), *lines, ""]))
    with pytest.raises(InvalidRequestError, match="recorded under another salt"):
        replay(app, path)


def test_one_block_at_a_time(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    with (
        engine.record(tmp_path / "one"),
        pytest.raises(InvalidRequestError, match="is already recording to"),
        engine.record(tmp_path / "two"),
    ):
        pass
    with engine.record(tmp_path / "two"):
        pass


SECRET = "zirconium"


@pytest.mark.parametrize("confidential", [False, True])
def test_confidential_words_are_not_in_the_file(make_engine: MakeEngine, tmp_path: Path, confidential: bool) -> None:
    """Nor their tokens, nor an input that holds them; and digests need a key that is not there."""
    engine, path = make_engine(), tmp_path / "run.jsonl"
    inner = ChoreoGraph().add_node(Agent("ida", confidential=True, sampling=FREE)).add_edge(START, "ida")
    asked, graph = inner.compile(engine=engine), ChoreoGraph(system=f"The public root says {SECRET}0.")
    graph.add_node(Agent("ann", system=f"Ann has {SECRET}1.", confidential=True, sampling=FREE))
    graph.add_node("ask", lambda _: {"messages": [AIMessage(asked.invoke(QUESTION)["messages"][-1].text)]})
    graph.add_node(Agent("bob", sampling=FREE, reads={"ann": "shared"}))
    graph.add_edge(START, "ann").add_edge("ann", "ask", visibility={}).add_edge("ask", "bob")
    app = graph.compile(engine=engine)
    with engine.record(path, confidential=confidential):
        state = app.invoke(QUESTION)
        app.invoke({"messages": [*state["messages"], ("user", f"And {SECRET}2?")]})
    said, recording, written = state["messages"], read_recording(path), path.read_text()
    assert f"{SECRET}0" not in written and f"{SECRET}1" not in written
    ann, ida, bob, *_ = recording.calls()
    assert (ann.author, ida.author, bob.author) == ("ann", "ask|ida", "bob")
    assert bob.text == said[-1].text and bob.tokens and ann.sampled == ida.sampled == 6
    if confidential:
        assert ann.text == said[1].text and ida.text == said[2].text and ann.tokens and ida.tokens
        assert recording.runs[1].input is not None
    else:
        assert [(each.text, each.tokens) for each in (ann, ida)] == [(None, None)] * 2
        assert recording.runs[1].input is None and len(recording.calls()) == 6
        tokens = [each.token for each in engine.logprobs(_handle(state, "ann"))]
        assert str(tokens)[1:-1].replace(" ", "") not in written
        with pytest.raises(ReplayError, match=r"input of run 2 .* is confidential"):
            replay(app, path)


def _handle(state: Any, author: str) -> MessageHandle:
    entry = next(each for each in state["handles"] if each["author"] == author)
    return MessageHandle.model_validate(entry["handle"])


def test_thoughts_are_not_in_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tokenizer = tokenizer_for("Qwen 3")
    save_tiny_llama(folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    with Engine.load(load_model(folder), memory=Memory(kv_budget_bytes=1 << 24)) as engine:
        graph = ChoreoGraph().add_node(Agent("ann", thinking=6, sampling=FREE)).add_edge(START, "ann")
        app, path = graph.compile(engine=engine), tmp_path / "run.jsonl"
        with engine.record(path):
            state = app.invoke(QUESTION)
        [call] = read_recording(path).calls()
        block = state["messages"][-1].content[0]
        assert block["type"] == "reasoning" and block["reasoning"]
        assert call.tokens is None and call.text == state["messages"][-1].text and call.sampled > 6
        assert call.tokens_encoded == engine.stats().tokens_encoded, "thoughts, and the answer for those who read it"
        report = replay(app, path)
        assert report.same and report.calls[0].recorded == call.text
        with engine.record(tmp_path / "whole.jsonl", confidential=True):
            app.invoke(QUESTION)
        [whole] = read_recording(tmp_path / "whole.jsonl").calls()
        assert whole.tokens is not None and len(whole.tokens) == whole.sampled
        assert replay(app, tmp_path / "whole.jsonl").same


KILLED = """
import os, signal, sys, time
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[3])
from choreo_agents import Engine, Memory
from support.recorded import QUESTION, looking

with Engine.load(sys.argv[1], memory=Memory(kv_budget_bytes=1 << 23)) as engine:
    app = looking().compile(engine=engine)
    with engine.record(sys.argv[2]):
        for part in app.stream(QUESTION):
            if "look" in part:
                while '"kind":"node"' not in open(sys.argv[2]).read():
                    time.sleep(0.01)
                with open(sys.argv[2], "a") as file:
                    file.write('{"kind":"call","run":0,"auth')  # half of a line
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_recording_whose_process_was_killed_is_read_up_to_there(
    make_engine: MakeEngine, tiny_path: Path, tmp_path: Path
) -> None:
    path, tests = tmp_path / "run.jsonl", Path(__file__).parents[2]
    program = [sys.executable, "-c", KILLED, str(tiny_path), str(path), str(tests)]
    environment = {**os.environ, "PYTHONPATH": str(tests.parent)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    recording = read_recording(path)
    assert recording.cut is not None and "the process ended" in recording.cut
    at_times = RecordedMessage, RecordedMemory, RecordedStep
    lines = [type(line) for line in recording.lines[1:] if not isinstance(line, at_times)]
    assert lines == [RecordedCall, RecordedNode]
    report = replay(looking().compile(engine=make_engine()), path)
    assert report.same, report
    [ann] = report.calls
    assert ann.place[0] == "ann" and ann.words == recording.calls()[0].text
    assert any("replayed up to there" in note for note in report.notes)


def test_a_damaged_line_is_named(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    with engine.record(path):
        looking().compile(engine=engine).invoke(QUESTION)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40], *lines[2:], ""]))
    with pytest.raises(InvalidRequestError, match="line 2 of"):
        read_recording(path)
    path.write_text("\n".join([json.dumps(json.loads(lines[0]) | {"format": 99}), ""]))
    with pytest.raises(InvalidRequestError, match="has format 99"):
        read_recording(path)
    path.write_text("Hello.\n")
    with pytest.raises(InvalidRequestError, match="is not a recording"):
        read_recording(path)


async def test_recording_does_not_block_the_event_loop(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"
    app = looking().compile(InMemorySaver(), engine=engine)
    config: Any = {"configurable": {"thread_id": "t"}}
    await app.ainvoke(QUESTION, config)
    with engine.record(path), blockbuster_ctx("choreo_agents"):
        await asyncio.gather(*(app.ainvoke(QUESTION, {"configurable": {"thread_id": name}}) for name in "ab"))
    assert len(read_recording(path).calls()) == 4


def test_a_run_that_fails_or_is_left_says_so(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(), tmp_path / "run.jsonl"

    def fails(_: Any) -> None:
        raise ValueError("zirconium")

    graph = ChoreoGraph().add_node(Agent("ann", sampling=FREE)).add_node("fails", fails)
    app = graph.add_edge(START, "ann").add_edge("ann", "fails", visibility={}).compile(engine=engine)
    with engine.record(path):
        with pytest.raises(ValueError, match="zirconium"):
            app.invoke(QUESTION)
        for _ in app.stream(QUESTION):
            break
    recording = read_recording(path)
    ended = [recording.ended(run) for run in (0, 1)]
    assert [each and (each.outcome, each.error) for each in ended] == [("failed", "ValueError"), ("left", None)]
    assert recording.nodes()[0].outcome == "error" and "zirconium" not in path.read_text()


def test_a_run_that_its_thread_refuses_has_not_begun(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path, config = make_engine(), tmp_path / "run.jsonl", RunnableConfig(configurable={"thread_id": "1"})
    graph = ChoreoGraph().add_node(Agent("ann", sampling=FREE)).add_edge(START, "ann")
    app = graph.compile(InMemorySaver(), engine=engine)
    with engine.record(path):
        with engine.threads.forgetting("1"), pytest.raises(ThreadBusyError):
            app.invoke(QUESTION, config)
        with engine.threads.forgetting("1"), pytest.raises(ThreadBusyError):
            asyncio.run(app.ainvoke(QUESTION, config))
        app.invoke(QUESTION, config)
    assert len(read_recording(path).runs) == 1 and not replay(app, path).differences
