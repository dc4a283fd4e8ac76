"""Agents of LangChain and LangGraph over `ChatChoreo`."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_choreo import ChatChoreo
from langchain_core.tools import tool
from langgraph.prebuilt import create_react_agent
from support.speaking import engine_that_says
from support.tool_templates import TOOL_CHECKPOINTS

CUT = '<tool_call>\n{"name": "forget", "arguments": {"whom": "customers of the old shop", "after_days": 365}}'
BROKEN = {
    "cut off": ("Qwen 3", CUT, 16),
    "cut off within a value": ("Qwen 3", CUT, 24),
    "under an unknown key": ("Qwen 3", '<tool_call>\n{"name": "forget", "who": "Ann"}\n</tool_call><|im_end|>', 60),
    "without names": ("LFM2", '<|tool_call_start|>[forget("nobody")]<|tool_call_end|><|im_end|>', 60),
    "nothing": ("gpt-oss", " to=functions.forget<|channel|>commentary json<|message|><|call|>", 60),
}


@pytest.mark.parametrize(("family", "says", "most"), BROKEN.values(), ids=[*BROKEN])
def test_no_tool_runs_with_what_nobody_has_written(family: str, says: str, most: int) -> None:
    """Also where LangGraph streams the model's messages, and adds the pieces up."""
    ran: list[str] = []

    @tool
    def forget(whom: str = "everybody", after_days: int = 0) -> str:
        """Forget people."""
        ran.append(whom)
        return "forgotten"

    with engine_that_says(TOOL_CHECKPOINTS[family], says) as (engine, _):
        chat = ChatChoreo(engine=engine, thinking=None if family == "LFM2" else False, max_tokens=most)
        agent: Any = create_react_agent(chat, [forget])
        asked = {"messages": [("user", "Clean up.")]}
        whole = agent.invoke(asked)["messages"][-1]
        [added_up] = [state["agent"]["messages"][-1] for state in agent.stream(asked, stream_mode="updates")]
        for _ in agent.stream(asked, stream_mode="messages"):
            pass
        assert not ran and not whole.tool_calls
        [broken], [same] = whole.invalid_tool_calls, added_up.invalid_tool_calls
        assert broken["error"] and (broken["name"], broken["args"]) == (same["name"], same["args"])
        bound = chat.bind_tools([forget])
        first, *rest = bound.stream("Clean up.")
        streamed: Any = first + rest  # type: ignore[operator]
        [piece] = streamed.invalid_tool_calls
        assert not streamed.tool_calls and piece["args"] == broken["args"]
