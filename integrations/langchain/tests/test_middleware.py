"""LangChain's `create_agent` and its middleware over `ChatChoreo`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    HumanInTheLoopMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    SummarizationMiddleware,
    ToolRetryMiddleware,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_choreo import ChatChoreo
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import BaseModel

from choreo_agents.testing import Script

ASKED: Any = {"messages": [("user", "Find it.")]}
LONG: Any = {"messages": [("user", "boats " * 800)]}
THREAD: RunnableConfig = {"configurable": {"thread_id": "1"}}


@tool
def find(thing: str) -> str:
    """Find a thing."""
    return f"{thing} found"


class City(BaseModel):
    """A city."""

    name: str


def call(tool_name: str, **arguments: str) -> str:
    """What the scripted model says to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': tool_name, 'arguments': arguments})}\n</tool_call>"


def script(*lines: str, **settings: Any) -> Script:
    """What the model says, call by call."""
    return Script({"agent.assistant": lines}, **settings)


def texts(state: Any) -> list[str]:
    return [message.text for message in state["messages"]]


async def test_an_agent_calls_its_tool_whole_awaited_and_streamed() -> None:
    says = script(*[call("find", thing="kite"), "Done."] * 3)
    with says.load() as engine:
        agent: Any = create_agent(ChatChoreo(engine=engine), [find], system_prompt="Be brief.")
        whole = agent.invoke(ASKED)
        assert texts(whole) == texts(await agent.ainvoke(ASKED)) == ["Find it.", "", "kite found", "Done."]
        pieces = [piece for piece, _ in agent.stream(ASKED, stream_mode="messages") if isinstance(piece, AIMessage)]
    assert "".join(piece.text for piece in pieces) == "Done."
    for calls in (whole["messages"][1].tool_calls, [call for piece in pieces for call in piece.tool_calls]):
        assert [(each["name"], each["args"]) for each in calls] == [("find", {"thing": "kite"})]
    used = whole["messages"][-1].usage_metadata
    assert used["input_tokens"] > used["input_token_details"]["cache_read"] > used["input_tokens"] / 2
    assert "Be brief." in says.calls[1].text and "kite found" in says.calls[1].text


@pytest.mark.parametrize("tools", [[], [find]], ids=["alone", "beside a tool"])
@pytest.mark.parametrize("form", [City, ToolStrategy(City)], ids=["a type", "by a call"])
def test_an_answer_has_the_type_that_is_asked_for(tools: list[Any], form: Any) -> None:
    with script(*[call("find", thing="kite")] * len(tools), call("City", name="Oslo")).load() as engine:
        agent: Any = create_agent(ChatChoreo(engine=engine), tools, response_format=form)
        assert agent.invoke(ASKED)["structured_response"] == City(name="Oslo")


def test_a_conversation_is_summarized_at_a_share_of_the_context() -> None:
    says = script("One.", "They sail.", "Two.", context=3000)
    with says.load() as engine:
        chat = ChatChoreo(engine=engine)
        at_half = SummarizationMiddleware(model=chat, trigger=("fraction", 0.5), keep=("messages", 1))
        agent: Any = create_agent(chat, [], middleware=[at_half], checkpointer=InMemorySaver())
        assert texts(agent.invoke(LONG, THREAD))[-1] == "One."
        summary, kept, last = texts(agent.invoke(LONG, THREAD))
    assert summary.endswith("They sail.") and (kept, last) == (LONG["messages"][0][1], "Two.")
    assert "They sail." in says.calls[-1].text and "One." not in says.calls[-1].text


def test_a_larger_model_steps_in_where_a_context_is_full() -> None:
    with Script(default="No.", context=200).load() as small, Script(default="Yes.").load() as large:
        larger = ModelFallbackMiddleware(ChatChoreo(engine=large))
        agent: Any = create_agent(ChatChoreo(engine=small), [], middleware=[larger])
        assert texts(agent.invoke(LONG))[-1] == "Yes."
        assert texts(agent.invoke(ASKED))[-1] == "No."


def test_a_model_that_is_late_is_asked_again_as_often_as_is_said() -> None:
    with Script(default="No.").load() as engine:
        again = ModelRetryMiddleware(max_retries=1, initial_delay=0, on_failure="continue")
        agent: Any = create_agent(ChatChoreo(engine=engine, timeout=1e-9), [], middleware=[again])
        assert texts(agent.invoke(ASKED))[-1].startswith("Model call failed after 2 attempts with RequestTimeoutError")


def test_a_tool_that_fails_is_run_again_with_the_same_arguments() -> None:
    ran: list[str] = []

    @tool
    def open_shop(door: str) -> str:
        """Open a door of the shop."""
        ran.append(door)
        if len(ran) == 1:
            raise ValueError("stuck")
        return "open"

    says = script(call("open_shop", door="red"), "Done.")
    with says.load() as engine:
        again = ToolRetryMiddleware(max_retries=1, initial_delay=0)
        agent: Any = create_agent(ChatChoreo(engine=engine), [open_shop], middleware=[again])
        assert texts(agent.invoke(ASKED)) == ["Find it.", "", "open", "Done."]
    assert ran == ["red", "red"] and not says.unsaid


@pytest.mark.parametrize(
    ("decision", "heard"),
    [
        ({"type": "approve"}, "kite found"),
        ({"type": "edit", "edited_action": {"name": "find", "args": {"thing": "boat"}}}, "boat found"),
        ({"type": "reject", "message": "leave it"}, "leave it"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_a_human_decides_on_a_call(decision: dict[str, Any], heard: str) -> None:
    says = script(call("find", thing="kite"), "Done.")
    with says.load() as engine:
        human = HumanInTheLoopMiddleware(interrupt_on={"find": True})
        agent: Any = create_agent(ChatChoreo(engine=engine), [find], middleware=[human], checkpointer=InMemorySaver())
        [question] = agent.invoke(ASKED, THREAD)["__interrupt__"]
        [action] = question.value["action_requests"]
        assert (action["name"], action["args"]) == ("find", {"thing": "kite"})
        assert texts(agent.invoke(Command(resume={"decisions": [decision]}), THREAD))[-1] == "Done."
    assert heard in says.calls[-1].text
