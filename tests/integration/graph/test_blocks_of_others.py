"""Messages of other providers' models in a conversation: thoughts, calls and pictures in blocks of theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from support.graphs import words_seen

from choreo_agents import START, Agent, ChoreoGraph, Engine, Sampling
from choreo_agents.chat.turns import short_id
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.signer import digest_of
from choreo_agents.testing import Script

CALL = '<tool_call>\n{"name": "find", "arguments": {"thing": "kites"}}\n</tool_call>'


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Script(default="Well.").load() as engine:
        yield engine
        engine.check()


def seen(engine: Engine, *messages: AnyMessage, **edges: Any) -> str:
    graph = ChoreoGraph(system="Be brief.").add_node(Agent("ann")).add_edge(START, "ann", **edges)
    return words_seen(engine, graph.compile(engine=engine).invoke({"messages": [*messages]}), "ann")


@pytest.mark.parametrize(
    "thought",
    [
        {"type": "reasoning", "reasoning": "SECRET"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "SECRET"}], "encrypted_content": "SECRET"},
        {"type": "thinking", "thinking": "SECRET", "signature": "SECRET"},
        {"type": "redacted_thinking", "data": "SECRET"},
        {"type": "reasoning_content", "reasoning_content": {"text": "SECRET"}},
    ],
)
@pytest.mark.parametrize("mode", ["shared", "reencoded"])
def test_thoughts_of_others_are_skipped(engine: Engine, thought: Any, mode: Any) -> None:
    said = AIMessage([thought, {"type": "text", "text": "In box 12."}])
    found = seen(engine, HumanMessage("Where?"), said, visibility=mode)
    assert "In box 12." in found and "SECRET" not in found and "summary" not in found


def test_thoughts_of_others_are_in_no_trace(engine: Engine) -> None:
    read: list[Any] = []

    class Heard(BaseCallbackHandler):
        def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
            read.extend(messages[0])

    blocks: list[Any] = [{"type": "thinking", "thinking": "SECRET"}, {"type": "text", "text": "In box 12."}, *USES[:1]]
    graph = ChoreoGraph().add_node(Agent("ann")).add_edge(START, "ann").compile(engine=engine)
    graph.invoke({"messages": [HumanMessage("Where?"), AIMessage(blocks)]}, {"callbacks": [Heard()]})
    assert "SECRET" not in repr(read) and [m.text for m in read] == ["Where?", "In box 12."]
    assert "toolu_01" in repr(read[1])


USES: list[Any] = [
    {"type": "tool_use", "id": "toolu_01", "name": "find", "input": {"thing": "kites"}},
    {"type": "tool_call", "id": "toolu_01", "name": "find", "args": {"thing": "kites"}},
    {"type": "function_call", "call_id": "toolu_01", "name": "find", "arguments": '{"thing": "kites"}', "id": "fc_1"},
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("mode", ["shared", "reencoded"])
def test_calls_in_blocks_are_calls_once(engine: Engine, use: Any, mirrored: bool, mode: Any) -> None:
    calls = [{"name": "find", "args": {"thing": "kites"}, "id": "toolu_01"}] if mirrored else []
    said = AIMessage([{"type": "text", "text": "Let me see."}, use], tool_calls=calls)
    result = ToolMessage("Box 12.", tool_call_id="toolu_01")
    found = seen(engine, HumanMessage("Where?"), said, result, visibility=mode)
    assert found.count(CALL) == 1 and found.index("Let me see.") < found.index(CALL) < found.index("find: Box 12.")
    assert short_id("toolu_01") not in found, "ids are the template's to show"


def test_a_call_that_a_person_has_edited_is_not_what_its_block_says(engine: Engine) -> None:
    said = AIMessage([USES[0]], tool_calls=[{"name": "find", "args": {"thing": "bells"}, "id": "toolu_01"}])
    found = seen(engine, HumanMessage("Where?"), said)
    assert "bells" in found and "kites" not in found


def test_arguments_that_were_cut_off_are_told(engine: Engine) -> None:
    found = seen(engine, HumanMessage("Where?"), AIMessage([USES[2] | {"arguments": '{"thing": "ki'}]))
    assert '{\\"thing\\": \\"ki' in found


def test_another_call_in_a_block_is_another_message() -> None:
    one, other = (AIMessage([USES[0] | {"input": {"thing": what}}], id="1") for what in ("kites", "bells"))
    assert digest_of(one) != digest_of(other)
    assert digest_of(AIMessage("a", id="1")) == digest_of(AIMessage([{"type": "text", "text": "a"}], id="1"))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            HumanMessage([{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": {"url": "x"}}]),
            "image_url",
        ),
        (HumanMessage([{"type": "image", "source": {"type": "base64", "data": "x"}}]), "image"),
        (HumanMessage([{"type": "audio", "data": "x"}]), "audio"),
        (HumanMessage([USES[0]]), "tool_use"),
    ],
)
def test_what_is_no_text_is_refused_by_name(engine: Engine, message: Any, kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"of the user holds more than text, '{kind}'.*RemoveMessage"):
        seen(engine, message)


def test_of_a_result_what_is_no_text_is_left_out_and_the_model_is_told(engine: Engine) -> None:
    result = ToolMessage([{"type": "text", "text": "Box 12."}, {"type": "image", "url": "x"}], tool_call_id="toolu_01")
    asked = AIMessage("", tool_calls=[{"name": "find", "args": {"thing": "bells"}, "id": "toolu_01"}])
    assert "Box 12.\n[image left out: no text]" in seen(engine, HumanMessage("Where?"), asked, result)


def test_a_thread_goes_on_once_what_was_refused_is_removed(engine: Engine) -> None:
    graph = ChoreoGraph().add_node(Agent("ann", sampling=Sampling(max_tokens=4))).add_edge(START, "ann")
    app, thread = graph.compile(InMemorySaver(), engine=engine), {"configurable": {"thread_id": "t"}}
    with pytest.raises(InvalidRequestError, match="RemoveMessage") as refusal:
        app.invoke({"messages": [HumanMessage([{"type": "image", "url": "x"}])]}, thread)
    [number] = re.findall(r"RemoveMessage\('(.*)'\)", str(refusal.value))
    app.update_state(thread, {"messages": [RemoveMessage(number)]})
    assert app.invoke({"messages": "Who has 3 red kites?"}, thread)["messages"][-1].text
