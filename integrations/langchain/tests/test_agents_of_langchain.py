"""Agents of LangChain and LangGraph over `ChatChoreo`."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_choreo import ChatChoreo
from langchain_core import exceptions
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langgraph.prebuilt import create_react_agent
from support.speaking import engine_that_says
from support.tool_templates import TOOL_CHECKPOINTS

from choreo_agents import Engine, errors
from choreo_agents.chat import context_of
from choreo_agents.testing import Script

CUT = '<tool_call>\n{"name": "forget", "arguments": {"whom": "customers of the old shop", "after_days": 365}}'
BROKEN = {
    "cut off": ("Qwen 3", CUT, 16),
    "cut off within a value": ("Qwen 3", CUT, 24),
    "under an unknown key": ("Qwen 3", '<tool_call>\n{"name": "forget", "who": "Ann"}\n</tool_call><|im_end|>', 60),
    "without names": (
        "listed",
        '<|tool_call_start|>[{"name": "forget", "arguments": ["nobody"]}]<|tool_call_end|><|im_end|>',
        60,
    ),
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
        chat = ChatChoreo(engine=engine, thinking=None if family == "listed" else False, max_tokens=most)
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


LONG = "boats " * 600


def test_a_larger_model_steps_in_where_a_context_is_full() -> None:
    with Script(default="No.", context=300).load() as small, Script(default="Yes.").load() as large:
        chat, other = ChatChoreo(engine=small), ChatChoreo(engine=large)
        with pytest.raises(ContextOverflowError, match="context is 300"):
            chat.invoke(LONG)
        both = chat.with_fallbacks([other], exceptions_to_handle=(ContextOverflowError,))
        assert both.invoke(LONG).text == "".join(piece.text for piece in both.stream(LONG)) == "Yes."
        assert chat.invoke("Hi").text == both.invoke("Hi").text == "No."


@pytest.mark.parametrize(
    ("raised", "known", "again"),
    [
        (errors.ContextLengthError, ContextOverflowError, False),
        (errors.KVBudgetError, ContextOverflowError, False),
        (errors.GrammarError, exceptions.ModelInvalidRequestError, False),
        (errors.ModelNotFoundError, exceptions.ModelNotFoundError, False),
        (errors.CapacityError, exceptions.ModelRateLimitError, True),
        (errors.RequestTimeoutError, exceptions.ModelTimeoutError, True),
        (errors.EngineLostError, exceptions.ModelConnectionError, True),
        (errors.DeviceLostError, exceptions.ModelAPIError, True),
    ],
)
def test_an_error_that_langchain_knows_is_its_own(raised: type[Exception], known: Any, again: bool) -> None:
    assert issubclass(raised, known) and known.is_retryable == again
    assert raised("what happened").is_retryable == again  # type: ignore[attr-defined]


def test_a_call_that_takes_too_long_is_langchains_timeout() -> None:
    with Script(default="Late.").load() as engine, pytest.raises(exceptions.ModelTimeoutError):
        ChatChoreo(engine=engine, timeout=1e-9).invoke("Hi")


def test_the_profile_says_how_much_is_read_before_anything_is_loaded(monkeypatch: Any) -> None:
    with Script(context=300).load() as engine:
        profile: Any = ChatChoreo(engine=engine).profile
        assert profile["max_input_tokens"] == 300 and profile["tool_calling"] and not profile["image_inputs"]
        assert ChatChoreo(engine=engine, profile={"max_input_tokens": 99}).profile == {"max_input_tokens": 99}
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("it is loaded"))
    lazy: Any = ChatChoreo(model="embedded").profile
    assert lazy["max_input_tokens"] == context_of("embedded") and lazy["max_input_tokens"] > 300
    unknown: Any = ChatChoreo(model="nobody/has-it").profile
    assert "max_input_tokens" not in unknown and unknown["tool_calling"]
