"""Agents that think before they speak: what state, streams, audits and readers get of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langgraph.graph import END, START
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama

from choreo_agents import Agent, ChoreoGraph, Engine, Memory, Policy, Rule, RunOptions, Sampling, Scheduling
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.runtime.timetable import Timetable


class Forced(dict[Any, Any]):
    """What nodes say, whenever they do."""

    def __missing__(self, place: tuple[str, int, int, int]) -> tuple[int, ...] | None:
        return self.get(place[0])


QUESTION = {"messages": [("user", "Why?")]}
ANSWER = Sampling(temperature=1.0, max_tokens=5)


@pytest.fixture(scope="module", params=["Qwen 3", "gpt-oss", "GLM-4.5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("thinker")
    tokenizer = tokenizer_for(request.param)
    save_tiny_llama(folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    return load_model(folder, chat={"date": "2026-11-23"})


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[Engine]:
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23), salt="s") as engine:
        yield engine


def chain(mode: str = "share", policy: Policy | None = None, **options: Any) -> ChoreoGraph:
    graph = ChoreoGraph(system="Be brief.", **({} if policy is None else {"policy": policy}))
    graph.add_node(Agent("ann", sampling=ANSWER, **({"thinking": 9} | options)))
    graph.add_node(Agent("bob", sampling=ANSWER, thinking=False))
    graph.add_edge(START, "ann")
    graph.add_edge("ann", "bob")
    graph.add_edge("bob", END)
    graph.share("ann", "bob") if mode == "share" else graph.share("ann", "bob", mode="reencoded")
    return graph


def handle_of(state: dict[str, Any], author: str) -> MessageHandle:
    return next(MessageHandle.model_validate(e["handle"]) for e in state["handles"] if e["author"] == author)


def test_thoughts_stand_in_a_reasoning_block_and_not_in_the_text(engine: Engine) -> None:
    state = chain().compile(engine=engine).invoke(QUESTION)
    ann = next(message for message in state["messages"] if message.name == "ann")
    assert isinstance(ann, AIMessage)
    [reasoning, text] = ann.content_blocks
    assert reasoning["type"] == "reasoning" and reasoning["reasoning"] and text["type"] == "text"
    assert text["text"] == ann.text and reasoning["reasoning"] not in engine.text(handle_of(state, "ann"))
    assert ann.usage_metadata is not None and ann.usage_metadata["output_token_details"]["reasoning"] >= 9
    bob = next(message for message in state["messages"] if message.name == "bob")
    assert isinstance(bob.content, str) and bob.usage_metadata is not None
    assert "output_token_details" not in bob.usage_metadata


@pytest.mark.parametrize("mode", ["share", "reencode"])
def test_readers_depend_on_the_words_alone(model: LoadedModel, mode: str) -> None:
    """Bit by bit: thoughts of one length, and the same answer."""
    found, ids = [], []
    for thoughts in ("it is so.", "it is not", "or what? "):
        rows: list[torch.Tensor] = []
        with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23), salt="s") as engine:
            assert engine.chat.thoughts is not None
            said = engine.model.encode(thoughts + engine.chat.thoughts.close + "ann: so")

            def watch(author: str, *_: int, into: list[torch.Tensor] = rows) -> Any:
                return (lambda row: into.append(row.clone())) if author == "bob" else None

            options = RunOptions(seed=3, replay=Forced(ann=tuple(said)), watch=watch)
            state = chain(mode).compile(engine=engine).invoke(QUESTION, {"configurable": {"choreo": options}})
            found.append(rows)
            ids.append(handle_of(state, "ann").id)
            assert thoughts.strip() in str(next(m for m in state["messages"] if m.name == "ann").content)
    assert len(set(ids)) == 1 and found[0]
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_audits_list_whom_thoughts_reach_as_words(engine: Engine) -> None:
    for mode in ("share", "reencode"):
        app = chain(mode).compile(engine=engine)
        foreseen = {(f.context, f.reader, f.channel) for f in app.audit().findings}
        assert ("ann.thoughts", "bob", "words") in foreseen
        assert ("ann.thoughts", "bob", "encoding") not in foreseen
        state = app.invoke(QUESTION)
        seen = {(f.context, f.reader, f.channel) for f in app.audit(state).findings}
        assert ("ann.thoughts", "bob", "words") in seen and seen <= foreseen
    silent = chain(thinking=False).compile(engine=engine)
    assert not any("thoughts" in finding.context for finding in silent.audit().findings)


def test_a_policy_of_words_must_allow_thoughts(engine: Engine) -> None:
    strict = {"confidential": {"ann.thoughts": frozenset[str]()}, "channels": frozenset({"words"})}
    with pytest.raises(VisibilityError, match=r"ann\.thoughts"):
        chain(policy=Policy(**strict)).compile(engine=engine)  # type: ignore[arg-type]
    allowed = strict | {"confidential": {"ann.thoughts": frozenset({"bob"})}}
    chain(policy=Policy(**allowed)).compile(engine=engine).invoke(QUESTION)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["shared", "reencoded"])
def test_a_policy_of_words_holds_at_call_time_as_well(engine: Engine, mode: str) -> None:
    graph = ChoreoGraph(policy=Policy(confidential={"ann.thoughts": frozenset()}, channels={"words"}))
    graph.add_node(Agent("ann", sampling=ANSWER, thinking=9)).add_node(Agent("bob", sampling=ANSWER, thinking=False))
    graph.add_edge(START, "ann").add_edge("ann", "bob", visibility={}).add_edge("bob", END)
    app = graph.compile(engine=engine)
    app.invoke(QUESTION)
    app.builder.nodes["bob"].runnable._reader_rules.sources["ann"] = Rule(mode)  # what no declaration had foreseen
    with pytest.raises(VisibilityError, match=r"the policy keeps 'ann\.thoughts' from 'bob', but the words of 'ann'"):
        app.invoke(QUESTION)


def test_streams_tell_thoughts_from_words(engine: Engine) -> None:
    app = chain().compile(engine=engine)
    chunks = [c for c, _ in app.stream(QUESTION, stream_mode="messages") if isinstance(c, AIMessageChunk)]
    ann = [chunk for chunk in chunks if chunk.name == "ann"]
    whole = ann[0]
    for chunk in ann[1:]:
        whole += chunk
    kinds = [block["type"] for block in whole.content_blocks]
    assert kinds == ["reasoning", "text"] and whole.text


def test_a_header_of_the_agents_own_stands_before_its_answer(engine: Engine) -> None:
    state = chain(header="Verdict:").compile(engine=engine).invoke(QUESTION)
    answer, chat = handle_of(state, "ann"), engine.chat
    [thought] = engine.inspect.thoughts(answer)
    assert chat.thoughts is not None
    opening = chat.assistant.opening(None).text + "Verdict:"
    assert engine.model.decode(list(engine.tokens(answer)), special=True).startswith(opening)
    text = engine.model.decode(list(engine.tokens(thought)), special=True)
    assert f"{chat.thoughts.close}Verdict:" in text and "ann:" not in text


def test_a_model_thinks_as_its_template_has_it_unless_told(engine: Engine) -> None:
    usual = chain(thinking=None).compile(engine=engine)
    assert any(finding.context == "ann.thoughts" for finding in usual.audit().findings)
    state = chain(thinking=True).compile(engine=engine).invoke(QUESTION, {"recursion_limit": 5})
    assert engine.inspect.thoughts(handle_of(state, "ann"))
    [bob] = [m for m in state["messages"] if m.name == "bob"]
    assert not engine.inspect.thoughts(handle_of(state, "bob")) and isinstance(bob.content, str)


@pytest.mark.parametrize("kept", [True, False])
def test_an_agent_recalls_what_it_has_thought_if_its_template_does(
    tmp_path_factory: pytest.TempPathFactory, kept: bool
) -> None:
    folder, tokenizer = tmp_path_factory.mktemp("thinker"), tokenizer_for("recalls" if kept else "Qwen 3")
    save_tiny_llama(folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    with Engine.load(folder, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        assert engine.chat.thoughts is not None and engine.chat.thoughts.kept is kept
        graph = chain()
        graph.add_node("again", Agent("ann", persona="ann", sampling=ANSWER, thinking=False))
        graph.add_node(Agent("eve", sampling=ANSWER, thinking=False))
        graph.add_edge("bob", "again").add_edge("again", "eve")
        app = graph.compile(engine=engine)
        state = app.invoke(QUESTION)
        [thought] = engine.inspect.thoughts(handle_of(state, "ann"))
        seen = engine.inspect.records([handle_of(state, "again")])[-1].parents
        assert (thought in seen) is kept and (handle_of(state, "ann") in seen) is not kept
        foreseen = {(f.context, f.reader, f.channel) for f in app.audit().findings}
        found = {(f.context, f.reader, f.channel) for f in app.audit(state).findings}
        assert found <= foreseen and ("ann.thoughts", "eve", "words") in foreseen
        assert (("ann.thoughts", "eve", "encoding") in found) is kept, "what she said later has attended to them"


def test_callbacks_are_told_what_an_agent_reads_and_no_thoughts_of_others(engine: Engine) -> None:
    read: list[list[Any]] = []

    class Listener(BaseCallbackHandler):
        def on_chat_model_start(self, serialized: Any, messages: list[list[BaseMessage]], **_: Any) -> None:
            read.append([message.content for message in messages[0]])

    state = chain().compile(engine=engine).invoke(QUESTION, {"callbacks": [Listener()]})
    [ann, _] = [message for message in state["messages"] if isinstance(message, AIMessage)]
    assert ann.content != str(ann.text), "she has thought"
    assert read == [["Be brief.", "Why?"], ["Be brief.", "Why?", str(ann.text)]]


def test_what_others_thought_before_the_same_words_is_theirs(engine: Engine) -> None:
    """Equal words in an equal place are one message, whoever said them; what was thought is not."""

    def said(*names: str) -> dict[str, AIMessage]:
        graph = ChoreoGraph(system="Be brief.")
        for name in names:
            graph.add_node(Agent(name, sampling=ANSWER, thinking=9, header="", choices=["yes"]))
            graph.add_edge(START, name)
            graph.add_edge(name, END)
        state = graph.compile(engine=engine).invoke(QUESTION)
        return {m.name: m for m in state["messages"] if isinstance(m, AIMessage)}

    names = ("ann", "bob", "carl", "dan")
    alone = {name: said(name)[name] for name in names}
    handles = {each.response_metadata["choreo"]["handle"] for each in alone.values()}
    assert len(handles) < len(names), "some of them have said the same"
    assert len({str(each.content) for each in alone.values()}) == len(names), "and none has thought the same"
    assert {name: said(name)[name].content for name in names} == {name: each.content for name, each in alone.items()}
    assert {name: each.content for name, each in said(*names).items()} == {n: each.content for n, each in alone.items()}


@pytest.mark.parametrize("thinking", [-1, 1.5, "yes"])
def test_what_says_nothing_about_thinking_is_refused(thinking: Any) -> None:
    with pytest.raises(InvalidRequestError, match="thinking of 'ann'"):
        Agent("ann", thinking=thinking)


def test_a_model_without_thoughts_is_not_made_to_think() -> None:
    with Engine.load("embedded") as engine, pytest.raises(InvalidRequestError, match="knows of no thoughts"):
        chain(thinking=True).compile(engine=engine)


def test_a_debate_in_which_models_think(model: LoadedModel) -> None:
    """Whatever they think, who hears the same words goes on with the same logits; and nobody hears more."""
    seen: list[dict[tuple[str, int], list[torch.Tensor]]] = []
    first = Timetable()
    for letter in "xyz":
        timetable = first if letter == "x" else first.again()
        rows: dict[tuple[str, int], list[torch.Tensor]] = {}
        scheduling = Scheduling(timetable=timetable)
        with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 24), scheduling=scheduling, salt="s") as engine:
            close = engine.chat.thoughts.close if engine.chat.thoughts is not None else ""
            said = {
                name: tuple(engine.model.encode(f"{letter * 7} {name}{close}{name[:3]}: so {name[-1]}"))
                for name in ("ann1", "bob1", "eve1", "ann2", "bob2", "eve2")
            }

            def watch(author: str, superstep: int, *_: int, into: Any = rows) -> Any:
                if author == "judge":
                    return lambda row: into.setdefault((author, superstep), []).append(row.clone())
                return None

            graph = ChoreoGraph(system="Be brief.")
            for name in said:
                graph.add_node(name, Agent(name[:3], persona=name[:3], sampling=ANSWER, thinking=12))
            graph.add_node("judge", Agent("judge", sampling=ANSWER, thinking=False))
            for one in ("ann1", "bob1", "eve1"):
                graph.add_edge(START, one)
                graph.share(one, "judge", mode="reencoded")
                for other in ("ann2", "bob2", "eve2"):
                    graph.add_edge(one, other)
            for other in ("ann2", "bob2", "eve2"):
                graph.add_edge(other, "judge")
            graph.add_edge("judge", END)
            app = graph.compile(engine=engine)
            options = RunOptions(seed=3, replay=Forced(said), watch=watch)
            state = app.invoke(QUESTION, {"configurable": {"choreo": options}})
            foreseen = {(f.context, f.reader, f.channel) for f in app.audit().findings}
            found = {(f.context, f.reader, f.channel) for f in app.audit(state).findings}
            assert found <= foreseen and ("ann1.thoughts", "judge", "words") in found
            assert not any("thoughts" in context and channel == "encoding" for context, _, channel in foreseen)
            thoughts = {
                str(block["reasoning"])
                for message in state["messages"]
                if isinstance(message, AIMessage)
                for block in message.content_blocks
                if block["type"] == "reasoning"
            }
            assert len(thoughts) == 6 and all(letter * 7 in thought for thought in thoughts)
            engine.check()
        seen.append(rows)
    assert seen[0] and all(rows.keys() == seen[0].keys() for rows in seen)
    for rows in seen[1:]:
        assert all(
            torch.equal(one, two) for place in rows for one, two in zip(rows[place], seen[0][place], strict=True)
        )
