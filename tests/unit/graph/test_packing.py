"""Inputs of runs, as a recording has them."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.types import Command, Overwrite, Send
from typing_extensions import TypedDict

from choreo_agents import ChoreoGraph
from choreo_agents.graph.recording.packing import is_private, pack, unpack

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    text = pack(value)
    assert text is not None
    back = unpack(text)
    assert back == value and repr(back) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        Command(goto=[Send("a", {"messages": [HumanMessage("Hm.", id="1")]}), "b"], update={"n": [1, 2]}),
        {"messages": [AIMessage("Hm.", id="1")], "n": 1},
        Overwrite([1, 2]),
        Command(resume={"a": 1}),
        {1, 2},
    ],
    ids=repr,
)
def test_inputs_come_back(value: Any) -> None:
    text = pack(value)
    assert text is not None and repr(unpack(text)) == repr(value)


def test_a_tuple_comes_back_as_a_list() -> None:
    text = pack({"messages": [("user", "Hm.")]})
    assert text is not None and unpack(text) == {"messages": [["user", "Hm."]]}


@dataclass
class Mine:
    """A type of a user's own."""

    number: int


class MyState(TypedDict):
    mine: Mine


def test_only_types_that_the_graphs_schemas_name_are_read_back() -> None:
    assert pack({"mine": Mine(3)}) is None
    named = ChoreoGraph(MyState)
    text = pack({"mine": Mine(3)}, named)
    assert text is not None and unpack(text, named) == {"mine": Mine(3)}


def test_nothing_is_unpickled() -> None:
    import base64

    written = base64.b64encode(pickle.dumps([1])).decode()
    with pytest.raises(ValueError, match="'pickle' cannot be read"):
        unpack(f"pickle:{written}")


def test_confidential_words_and_thoughts_are_seen_wherever_they_stand() -> None:
    confidential = AIMessage("x", response_metadata={"choreo": {"author": "ann", "confidential": True}})
    thought = AIMessage([{"type": "reasoning", "reasoning": "x"}, {"type": "text", "text": "y"}])
    for message in (confidential, thought):
        assert is_private({"messages": [message]}) and is_private([Send("a", {"x": (message,)})])
        assert is_private(Command(update={"messages": Overwrite([message])})) and is_private(
            {"box": deque([{message.type: message}])}
        )
        assert is_private([HumanMessage("y", additional_kwargs={"of": [message]})])
        assert is_private([ToolMessage("y", tool_call_id="1", artifact={"said": message})])
    assert not is_private({"messages": [AIMessage("x")]})
