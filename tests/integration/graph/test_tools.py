"""Agents that call tools, in LangGraph's own loops: what they are told, say, stream, and what they get back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt
from support.checkpoints import save_checkpoint
from support.graphs import words_seen
from support.speaking import speaking
from support.tiny import save_tiny_llama
from support.tool_templates import TOOL_CHECKPOINTS, TOOL_TEMPLATES, tool_tokenizer

from choreo_agents import Agent, ChoreoGraph, Engine, Memory, RunOptions, Sampling
from choreo_agents.chat.turns import short_id
from choreo_agents.models import LoadedModel, ToolCall, load_model, tools_format

QUESTION = {"messages": [("user", "Where are the kites?")]}
SAMPLING = Sampling(max_tokens=200)


@tool
def find(thing: str, floor: int = 0) -> str:
    """Say in which box a thing is."""
    return f"The {thing} are in box {12 + floor}."


@tool
def count(things: list[str]) -> int:
    """Count things."""
    return len(things)


@pytest.fixture(scope="module", params=[*TOOL_TEMPLATES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("caller")
    if request.param in TOOL_CHECKPOINTS:
        return load_model(save_checkpoint(folder, TOOL_CHECKPOINTS[request.param]))
    tokenizer = tool_tokenizer(request.param)
    ends = [tokenizer.convert_tokens_to_ids(t) for t in ("<|eom_id|>", "<|observation|>") if t in tokenizer.get_vocab()]
    save_tiny_llama(
        folder,
        vocab_size=len(tokenizer),
        eos_token_id=[tokenizer.eos_token_id, *ends],
        num_hidden_layers=1,
        max_position_embeddings=8192,
    )
    tokenizer.save_pretrained(folder)
    return load_model(folder)


Say = Callable[..., None]


@pytest.fixture
def told() -> list[Sequence[int]]:
    return []


@pytest.fixture
def engine(model: LoadedModel, told: list[Sequence[int]]) -> Iterator[Engine]:
    with Engine.load(speaking(model, told), memory=Memory(kv_budget_bytes=1 << 25), salt="s") as engine:
        yield engine
        engine.check()


@pytest.fixture
def say(model: LoadedModel, told: list[Sequence[int]]) -> Say:
    def says(words: str = "", *calls: ToolCall) -> None:
        how = tools_format(model.chat)
        if calls:
            text = how.turn("" if how.is_headed else words, calls)
            opening, end = how.opening, how.call_end
        else:
            text = model.chat.turn("assistant", words)
            opening, end = (how.opening if how.is_headed else model.chat.assistant.plain), model.chat.turn_end
        tokens = model.encode(text)
        start = model.encode(opening.rstrip(" "))
        assert tokens[: len(start)] == start
        said = tokens[len(start) :]
        if how.is_headed and not calls:  # what closes a message of a turn does not end the turn
            said, end = said[: -len(model.encode(end))], ""
        told.append([*said, *([] if end else [model.adapter.end_tokens[0]])])

    return says


def loop(*tools: Any, **options: Any) -> ChoreoGraph:
    graph = ChoreoGraph(system="Be brief.")
    graph.add_node(Agent("ann", tools=tools, sampling=SAMPLING, **({"thinking": None} | options)))
    graph.add_node("tools", ToolNode([each for each in tools if hasattr(each, "invoke")]))
    graph.add_edge(START, "ann").add_conditional_edges("ann", tools_condition, ["tools", END])
    graph.add_edge("tools", "ann")
    return graph


def unthinking(model: LoadedModel) -> dict[str, Any]:
    return {"thinking": False if model.chat.thoughts is not None else None}


def test_a_stock_loop_calls_and_answers(engine: Engine, model: LoadedModel, say: Say) -> None:
    say("", ToolCall("find", {"thing": "kites", "floor": 2}, "abcdefgh1"))
    say("In box 14.")
    app = loop(find, count, **unthinking(model)).compile(engine=engine)
    state = app.invoke(QUESTION)
    _, called, result, answer = state["messages"]
    assert [(c["name"], c["args"]) for c in called.tool_calls] == [("find", {"thing": "kites", "floor": 2})]
    assert called.text == "" and not called.invalid_tool_calls
    assert [m.response_metadata["finish_reason"] for m in (called, answer)] == ["tool_calls", "stop"]
    assert result.tool_call_id == called.tool_calls[0]["id"] and result.text == "The kites are in box 14."
    assert answer.text == "In box 14." and not answer.tool_calls
    seen = words_seen(engine, state, "ann")
    how = tools_format(model.chat)
    assert "Say in which box a thing is." in seen and "Be brief." in seen
    assert seen.count("The kites are in box 14.") == 1
    if how.result is not None:
        assert how.result.around("The kites are in box 14.", "find", result.tool_call_id).text in seen
    # As the model has written it, behind the header that it was asked to speak behind.
    assert (
        how.grammar.write([ToolCall("find", {"thing": "kites", "floor": 2}, "abcdefgh1")]).text + how.call_end in seen
    )


def test_calls_of_history_stand_as_the_template_writes_them(engine: Engine, model: LoadedModel, say: Say) -> None:
    """Also those of other providers, with ids of theirs."""
    say("In box 12.")
    asked = AIMessage("", tool_calls=[{"name": "find", "args": {"thing": "kites"}, "id": "call_0123456789abcdef"}])
    given = [HumanMessage("Where?"), asked, ToolMessage("Box 12.", tool_call_id="call_0123456789abcdef")]
    graph = ChoreoGraph().add_node(Agent("ann", tools=[find], sampling=SAMPLING, **unthinking(model)))
    app = graph.add_edge(START, "ann").compile(engine=engine)
    state = app.invoke({"messages": given})
    template = model.tokenizer.apply_chat_template
    call = {"id": "abcdefgh1", "function": {"name": "find", "arguments": {"thing": "kites"}}}
    turns = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Box 12.", "tool_call_id": "abcdefgh1", "name": "find"},
    ]
    whole = template(turns, tools=[convert_to_openai_tool(find)], tools_in_user_message=False, tokenize=False)
    seen = words_seen(engine, state, "ann").replace(short_id("call_0123456789abcdef"), "abcdefgh1")
    before, _, behind = whole.partition("Where?")
    assert seen.endswith("Where?" + behind.removeprefix(""))
    if model.chat.leads:
        assert seen.startswith(before.removesuffix(model.chat.user.plain))
    elif "Calls to these tools must go" not in before:  # which stands in what all agents see first
        assert seen.startswith(before)


def test_text_and_calls_stream_as_they_come(engine: Engine, model: LoadedModel, say: Say) -> None:
    how = tools_format(model.chat)
    speaks = not how.grammar.is_bare and not how.is_headed
    calls = [
        ToolCall("find", {"thing": 'a "kite" {'}, "abcdefgh1"),
        ToolCall("count", {"things": ["a", "b"]}, "abcdefgh2"),
    ]
    calls = calls[:1] if how.is_headed else calls
    say("Let me see." if speaks else "", *calls)
    say("Done.")
    app = loop(find, count, **unthinking(model)).compile(engine=engine)
    chunks = [c for c, _ in app.stream(QUESTION, stream_mode="messages") if isinstance(c, AIMessageChunk)]
    first = [chunk for chunk in chunks if chunk.id == chunks[0].id]
    whole = first[0]
    for chunk in first[1:]:
        whole += chunk
    assert whole.text.strip() == ("Let me see." if speaks else "")
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [(c.name, dict(c.arguments)) for c in calls]
    if speaks:
        words = [chunk for chunk in first if chunk.text.strip()]
        assert len(words) > 3 and not any(chunk.tool_call_chunks for chunk in words)
    assert sum(len(chunk.tool_call_chunks) for chunk in first) == len(calls)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_preamble_does_not_end_the_turn(
    engine: Engine, model: LoadedModel, told: list[Sequence[int]], thinking: bool
) -> None:
    """Of a model whose turns have several messages: what it says before it calls or answers is the answer's start."""
    if not tools_format(model.chat).is_headed:
        pytest.skip("its turns are one message")
    preamble = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
    thoughts = (
        "I plan.<|end|><|start|>assistant" if thinking else "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    )
    call = ' to=functions.find<|channel|>commentary json<|message|>{"thing": "kites"}<|call|>'
    told += [model.encode(f"{thoughts}{preamble}{call}")]
    told += [model.encode(f"{thoughts}{preamble}<|channel|>final<|message|>In box 12.<|return|>")]
    state = loop(find, thinking=thinking).compile(engine=engine).invoke(QUESTION)
    _, called, result, answer = state["messages"]
    assert (called.text, result.text) == ("I look it up.", "The kites are in box 12.")
    assert answer.text == "I look it up.\n\nIn box 12." and answer.response_metadata["finish_reason"] == "stop"
    assert words_seen(engine, state, "ann").count("I look it up.") == 1


def test_parallel_calls_run_side_by_side(engine: Engine, model: LoadedModel, say: Say) -> None:
    if tools_format(model.chat).is_headed:
        pytest.skip("its calls end its turn, each")
    say("", ToolCall("find", {"thing": "kites"}, "abcdefgh1"), ToolCall("count", {"things": ["a"]}, "abcdefgh2"))
    say("Box 12, one.")
    state = loop(find, count, **unthinking(model)).compile(engine=engine).invoke(QUESTION)
    _, called, one, other, answer = state["messages"]
    assert [one.text, other.text] == ["The kites are in box 12.", "1"] and answer.text == "Box 12, one."
    assert [one.tool_call_id, other.tool_call_id] == [call["id"] for call in called.tool_calls]
    assert len({call["id"] for call in called.tool_calls}) == 2


def test_a_broken_call_is_invalid_and_ends_the_loop(
    engine: Engine, model: LoadedModel, told: list[Sequence[int]], say: Say
) -> None:
    how = tools_format(model.chat)
    if how.grammar.is_bare:
        pytest.skip("what is no call there is words")
    say("", ToolCall("find", {"thing": "kites"}, "abcdefgh1"))
    [whole] = told
    text = model.decode([*whole]).replace("kites", 'kites"""" {')
    told[:] = [model.encode(text)]
    say("Done.")
    state = loop(find, **unthinking(model)).compile(engine=engine).invoke(QUESTION)
    said = state["messages"][-1]
    if how.grammar.kind == "pairs":
        assert 'kites"""" {' in state["messages"][-2].text  # nothing needs quotes there
        return
    assert not said.tool_calls and said.invalid_tool_calls
    [broken] = said.invalid_tool_calls
    assert broken["error"] and "kites" in str(broken["args"]) and "kites" not in said.text


def test_ids_are_the_same_again(model: LoadedModel, told: list[Sequence[int]], say: Say) -> None:
    """By memory, by replay, and in another engine with the same salt."""
    found: list[Any] = []
    say("", ToolCall("find", {"thing": "kites"}, "abcdefgh1"))
    [tokens] = told
    for replayed in (False, True):
        with Engine.load(speaking(model, told), memory=Memory(kv_budget_bytes=1 << 24), salt="s") as engine:
            graph = ChoreoGraph().add_node(Agent("ann", tools=[find], sampling=SAMPLING, **unthinking(model)))
            app = graph.add_edge(START, "ann").compile(engine=engine)
            options = RunOptions(replay={("ann", 1, 0, 0): tuple(tokens)} if replayed else None)
            state = app.invoke(QUESTION, {"configurable": {"choreo": options}})
            found.append((state["messages"][-1].tool_calls, state["messages"][-1].text))
    assert found[0] == found[1] and found[0][0]


@tool
def ask(what: str) -> str:
    """Ask a person."""
    return f"They say: {interrupt(what)}"


def test_interrupts_within_tools_work_as_stock(engine: Engine, model: LoadedModel, say: Say) -> None:
    say("", ToolCall("ask", {"what": "May I?"}, "abcdefgh1"))
    say("Good.")
    app = loop(ask, **unthinking(model)).compile(InMemorySaver(), engine=engine)
    config = {"configurable": {"thread_id": "1"}}
    state = app.invoke(QUESTION, config)
    assert state["__interrupt__"][0].value == "May I?"
    state = app.invoke(Command(resume="yes"), config)
    assert [message.text for message in state["messages"]][-2:] == ["They say: yes", "Good."]


def test_an_edited_call_is_encoded_as_it_now_reads(engine: Engine, model: LoadedModel, say: Say) -> None:
    """A person changes what a tool is called with before it runs."""
    say("", ToolCall("find", {"thing": "kites"}, "abcdefgh1"))
    say("In box 12.")
    app = loop(find, **unthinking(model)).compile(InMemorySaver(), engine=engine, interrupt_before=["tools"])
    config = {"configurable": {"thread_id": "1"}}
    state = app.invoke(QUESTION, config)
    said = state["messages"][-1]
    [call] = said.tool_calls
    edited = said.model_copy(update={"tool_calls": [call | {"args": {"thing": "bells"}}]})
    app.update_state(config, {"messages": [edited]})
    state = app.invoke(None, config)
    assert state["messages"][-2].text == "The bells are in box 12."
    seen = words_seen(engine, state, "ann")
    assert "bells" in seen and "kites are" not in seen and '"kites"' not in seen
    assert {entry["author"] for entry in state["handles"]} == {"__start__", "ann"}


def test_thoughts_come_before_calls_and_stay_their_speakers(
    engine: Engine, model: LoadedModel, told: list[Sequence[int]], say: Say
) -> None:
    chat = model.chat
    if chat.thoughts is None:
        pytest.skip("it does not think")
    how = tools_format(chat)
    say("", ToolCall("find", {"thing": "kites"}, "abcdefgh1"))
    say("In box 12.")
    close = chat.thoughts.close.partition(how.opening)[0] + how.opening if how.is_headed else chat.thoughts.close
    told[:] = [[*model.encode("Which box?" + close), *tokens] for tokens in told]
    app = loop(find, thinking=60).compile(engine=engine)
    state = app.invoke(QUESTION)
    _, called, result, answer = state["messages"]
    assert called.tool_calls[0]["args"] == {"thing": "kites"} and result.text == "The kites are in box 12."
    assert [block["type"] for block in called.content] == ["reasoning"]
    assert answer.text == "In box 12." and answer.content[0]["reasoning"] == "Which box?"
    assert "Which box?" not in words_seen(engine, state, "ann")
