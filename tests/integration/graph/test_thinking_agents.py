"""Agents that think before they speak: what state, streams, audits and readers get of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama

from choreo_agents import (
    Agent,
    ChoreoGraph,
    Engine,
    HistoryLimit,
    Memory,
    Policy,
    RunOptions,
    Sampling,
    Scheduling,
    Send,
    VisibilityRule,
    Worker,
)
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.runtime.step_trace import StepTrace


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


@pytest.fixture(scope="module")
def recalling_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder, tokenizer = tmp_path_factory.mktemp("thinker"), tokenizer_for("recalls")
    save_tiny_llama(folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    return load_model(folder)


@pytest.fixture
def recalling(recalling_model: LoadedModel) -> Iterator[Engine]:
    """Of a model whose template shows it what it has thought in earlier turns."""
    with Engine.load(recalling_model, memory=Memory(kv_budget_bytes=1 << 23), salt="s") as engine:
        yield engine
        engine.check()


def chain(mode: str = "share", policy: Policy | None = None, **options: Any) -> ChoreoGraph:
    graph = ChoreoGraph(system="Be brief.", **({} if policy is None else {"policy": policy}))
    graph.add_node(Agent("ann", sampling=ANSWER, **({"thinking": 9} | options)))
    graph.add_node(Agent("bob", sampling=ANSWER, thinking=False))
    graph.add_edge(START, "ann")
    graph.add_edge("ann", "bob")
    graph.add_edge("bob", END)
    graph.set_visibility("ann", "bob") if mode == "share" else graph.set_visibility("ann", "bob", mode="reencoded")
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


def test_a_summary_is_told_nobody_elses_thoughts(engine: Engine) -> None:
    told: list[BaseMessage] = []
    graph = ChoreoGraph(visibility="shared")
    graph.add_node(Agent("ann", sampling=ANSWER, thinking=9)).add_edge(START, "ann").add_edge("ann", "bob")
    graph.add_node(Agent("bob", sampling=ANSWER, thinking=False, history=HistoryLimit(last=0, summary=told.extend)))
    state = graph.compile(engine=engine).invoke(QUESTION)
    [_, ann] = told
    assert state["messages"][1].content_blocks[0]["type"] == "reasoning"
    assert ann.content == state["messages"][1].text and ann.name == "ann"


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

            options = RunOptions(seed=3, replay=Forced(ann=tuple(said)), logits_callback=watch)
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
    app.builder.nodes["bob"].runnable._reader_rules.sources["ann"] = VisibilityRule(
        mode
    )  # what no declaration had foreseen
    with pytest.raises(VisibilityError, match=r"the policy keeps 'ann\.thoughts' from 'bob', but the text of 'ann'"):
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
    state = chain(assistant_prefix="Verdict:").compile(engine=engine).invoke(QUESTION)
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


def test_thoughts_do_not_go_along_to_another_model(recalling: Engine, tmp_path: Path) -> None:
    """Whose template would show them, too: they stand in the encodings of the model that has thought them."""
    tokenizer = tokenizer_for("recalls")
    save_tiny_llama(tmp_path, seed=1, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(tmp_path)
    with Engine.load(tmp_path, memory=Memory(kv_budget_bytes=1 << 23), salt="s") as other:
        graph = ChoreoGraph()
        graph.add_node(Agent("ann", engine="one", sampling=ANSWER, thinking=9))
        for name in ("again", "more"):
            graph.add_node(name, Agent("ann", engine="other", persona="ann", sampling=ANSWER, thinking=False))
        graph.add_edge(START, "ann").add_edge("ann", "again").add_edge("again", "more")
        app = graph.compile(engine={"one": recalling, "other": other})
        state = app.invoke(QUESTION)
        [ann] = [m for m in state["messages"] if m.id == state["handles"][1]["message_id"]]
        assert other.chat.thoughts is not None and other.chat.thoughts.kept and state["handles"][1]["thoughts"]
        for name in ("again", "more"):
            seen = texts_of(other, state, name)
            assert any(ann.text in each for each in seen)
            assert not any(ann.content[0]["reasoning"] in each for each in seen)
        assert ("ann.thoughts", "encoding") not in {(f.context, f.channel) for f in app.audit(state).findings}
        other.check()


def longer() -> ChoreoGraph:
    """A chain in which an agent that has thought speaks again."""
    graph = chain()
    graph.add_node("again", Agent("ann", persona="ann", sampling=ANSWER, thinking=False))
    graph.add_node(Agent("eve", sampling=ANSWER, thinking=False, reads={"ann": "shared"}))
    return graph.add_edge("bob", "again").add_edge("again", "eve")


def halfway(engine: Engine) -> tuple[Any, Any, AIMessage]:
    """A run that waits before an agent speaks again, where that is, and what it has said with its thoughts."""
    app = longer().compile(engine=engine, checkpointer=InMemorySaver(), interrupt_before=["again"])
    thread: Any = {"configurable": {"thread_id": "t"}}
    state = app.invoke(QUESTION, thread)
    [ann] = [m for m in state["messages"] if m.name == "ann"]
    return app, thread, ann


def entry_of(state: dict[str, Any], message: BaseMessage) -> dict[str, Any]:
    [entry] = [dict(entry) for entry in state["handles"] if entry["message_id"] == message.id]
    return entry


def texts_of(engine: Engine, state: dict[str, Any], author: str) -> list[str]:
    """What stood in the view of what an author has said."""
    view = engine.inspect.records([handle_of(state, author)])[-1].parents
    above = {made.handle: made.tokens for made in engine.inspect.records([handle_of(state, author)])}
    return [engine.model.decode(list(above[each]), special=True) for each in view]


def is_foreseen(app: Any, state: dict[str, Any]) -> bool:
    found, foreseen = ({(f.context, f.reader, f.channel) for f in r.findings} for r in (app.audit(state), app.audit()))
    return found <= foreseen and ("ann.thoughts", "bob", "words") in found


@pytest.mark.parametrize("recall", [True, False])
@pytest.mark.parametrize("edit", ["other", "none", "block"])
def test_edited_thoughts_are_an_edit(recalling: Engine, engine: Engine, recall: bool, edit: str) -> None:
    """An operator's: its speaker recalls neither the old ones nor the new, and the entry says so."""
    here = recalling if recall else engine
    app, thread, ann = halfway(here)
    reasoning, text = ann.content
    before = entry_of(app.get_state(thread).values, ann)
    content: Any = {"other": [{"type": "reasoning", "reasoning": "I say </think> red."}, text], "none": ann.text}
    content["block"] = [text]
    app.update_state(thread, {"messages": [ann.model_copy(update={"content": content[edit]})]})
    state = app.invoke(None, thread)
    entry, [thought] = entry_of(state, ann), here.inspect.thoughts(MessageHandle.model_validate(before["handle"]))
    assert entry["edited"] and entry["thoughts"] is None and entry["author"] == "ann"
    assert not entry["confidential"] and entry["handle"] != before["handle"]
    recalled = texts_of(here, state, "again")
    assert not any("I say </think> red." in each for each in recalled)
    assert not any(str(reasoning["reasoning"]) in each for each in recalled)  # type: ignore[index]
    assert not any(thought == each.handle for each in here.inspect.records([handle_of(state, "again")]))
    assert not any("I say" in each for each in texts_of(here, state, "eve")), "she sees what ann said alone"
    assert is_foreseen(app, state)
    found = {(f.context, f.reader, f.channel) for f in app.audit(state).findings}
    assert ("ann.thoughts", "eve", "encoding") not in found
    here.check()


def test_thoughts_that_an_engine_has_forgotten_are_left_out(recalling: Engine, recalling_model: LoadedModel) -> None:
    app, thread, ann = halfway(recalling)
    state = app.get_state(thread).values
    with Engine.load(recalling_model, memory=Memory(kv_budget_bytes=1 << 23), salt="s") as other:
        there = longer().compile(InMemorySaver(), engine=other)
        there.update_state(thread, state)
        state = there.invoke({"messages": [("user", "And now?")]}, thread)
        entry = entry_of(state, ann)
        assert "edited" not in entry and entry["thoughts"]
        again = next(e for e in reversed(state["handles"]) if e["author"] == "ann")
        *above, _ = other.inspect.records([MessageHandle.model_validate(again["handle"])])
        turns = [other.model.decode(list(each.tokens), special=True) for each in above]
        assert any(ann.text in turn for turn in turns)
        assert not any(ann.content[0]["reasoning"] in turn for turn in turns)  # type: ignore[index]
        assert is_foreseen(there, state)
        other.check()


def test_a_fork_keeps_thoughts_when_their_thread_is_forgotten(recalling: Engine) -> None:
    app, thread, ann = halfway(recalling)
    state, fork = app.get_state(thread).values, {"configurable": {"thread_id": "fork"}}
    app.update_state(fork, {name: state[name] for name in ("messages", "handles")}, as_node="bob")
    app.invoke(None, fork, interrupt_before=[])
    app.delete_thread("t")
    thoughts = MessageHandle.model_validate(entry_of(state, ann)["thoughts"])
    assert ann.content[0]["reasoning"] in recalling.text(thoughts, special=True)  # type: ignore[index]
    app.delete_thread("fork")
    assert recalling.stats().leases == 0


def test_a_client_that_gives_words_back_without_thoughts_edits_nothing(recalling: Engine) -> None:
    app = chain().compile(engine=recalling, checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "t"}}
    said = app.invoke(QUESTION, thread)
    [ann] = [m for m in said["messages"] if m.name == "ann"]
    for echo in (AIMessage(str(ann.text), id=ann.id, name="ann"), ann.model_copy(update={"content": str(ann.text)})):
        state = app.invoke({"messages": [echo, ("user", "And now?")]}, thread)
        assert next(m for m in state["messages"] if m.id == ann.id) == ann
        assert entry_of(state, ann) == entry_of(said, ann)
        assert sum(str(ann.text) == m.text for m in state["messages"]) == 1


def test_words_without_their_thoughts_that_are_handed_on_stay_their_speakers(recalling: Engine) -> None:
    """Clients and functions may drop thoughts: they put none into its mouth."""
    forged = [{"type": "reasoning", "reasoning": "I forge."}]

    def returned(drop: str) -> Any:
        def node(state: dict[str, Any]) -> dict[str, Any]:
            [ann] = [m for m in state["messages"] if m.name == "ann"]
            content: Any = ann.text if drop == "text" else [*forged, {"type": "text", "text": ann.text}]
            return {"messages": [ann.model_copy(update={"content": content})]}

        graph = ChoreoGraph()
        graph.add_node(Agent("ann", sampling=ANSWER, thinking=9)).add_node("trim", node)
        graph.add_node("again", Agent("ann", persona="ann", sampling=ANSWER, thinking=False, reads={"trim": "shared"}))
        graph.add_edge(START, "ann").add_edge("ann", "trim").add_edge("trim", "again")
        return graph.compile(engine=recalling).invoke(QUESTION)

    state = returned("text")
    [ann] = [m for m in state["messages"] if m.name == "ann"]
    assert entry_of(state, ann)["author"] == "ann" and entry_of(state, ann)["thoughts"] is None
    state = returned("forged")
    assert not any(each["author"] == "ann" and each.get("thoughts") is None for each in state["handles"])
    turns = texts_of(recalling, state, "again")
    assert not any("I forge." in turn for turn in turns)


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
            graph.add_node(Agent(name, sampling=ANSWER, thinking=9, assistant_prefix="", choices=["yes"]))
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


@pytest.mark.parametrize("many", ["n", "send"])
def test_what_one_call_thought_is_not_taken_for_anothers(engine: Engine, many: str) -> None:
    """Calls of one author that come to the same words over the same view: each notes what it thought itself."""
    graph = ChoreoGraph(system="Be brief.")
    kind = partial(Worker, n=4) if many == "n" else Agent
    graph.add_node(kind("ann", sampling=ANSWER, thinking=9, assistant_prefix="", choices=["yes"]))
    if many == "n":
        graph.add_edge(START, "ann")
    else:
        graph.add_conditional_edges(START, lambda state: [Send("ann", state) for _ in range(4)], ["ann"])
    state = graph.add_edge("ann", END).compile(engine=engine).invoke(QUESTION)
    said = [message for message in state["messages"] if isinstance(message, AIMessage)]
    entries = {entry["message_id"]: entry for entry in state["handles"]}
    handles = [entries[str(message.id)]["handle"]["id"] for message in said]
    assert len(said) == 4 and len(set(handles)) < 4, "some of them have said the same"
    assert len({str(message.content) for message in said}) == 4, "and none has thought the same"
    for message in said:
        [reasoning, _] = message.content_blocks
        thought = MessageHandle.model_validate(entries[str(message.id)]["thoughts"])
        text = engine.model.decode(list(engine.tokens(thought)), special=False)
        assert str(reasoning["reasoning"]) in text  # type: ignore[typeddict-item]
    engine.check()


@pytest.mark.parametrize("thinking", [-1, 1.5, "yes"])
def test_what_says_nothing_about_thinking_is_refused(thinking: Any) -> None:
    with pytest.raises(InvalidRequestError, match="thinking of 'ann'"):
        Agent("ann", thinking=thinking)


def test_a_model_without_thoughts_is_not_made_to_think() -> None:
    with Engine.load("embedded") as engine, pytest.raises(InvalidRequestError, match="does not support"):
        chain(thinking=True).compile(engine=engine)


def test_a_debate_in_which_models_think(model: LoadedModel) -> None:
    """Whatever they think, who hears the same words goes on with the same logits; and nobody hears more."""
    seen: list[dict[tuple[str, int], list[torch.Tensor]]] = []
    first = StepTrace()
    for letter in "xyz":
        step_trace = first if letter == "x" else first.replay()
        rows: dict[tuple[str, int], list[torch.Tensor]] = {}
        scheduling = Scheduling(step_trace=step_trace)
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
                graph.set_visibility(one, "judge", mode="reencoded")
                for other in ("ann2", "bob2", "eve2"):
                    graph.add_edge(one, other)
            for other in ("ann2", "bob2", "eve2"):
                graph.add_edge(other, "judge")
            graph.add_edge("judge", END)
            app = graph.compile(engine=engine)
            options = RunOptions(seed=3, replay=Forced(said), logits_callback=watch)
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
