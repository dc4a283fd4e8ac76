"""What functions take and return, as a recording has it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.types import Command, Overwrite, Send
from typing_extensions import TypedDict

from choreo_agents import ChoreoGraph
from choreo_agents.graph.recording.packing import Packing, canonical, hides, referring, resolved, tells

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner).filter(lambda d: d != {"x": 0})
    ),
)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    text = Packing(None).packed(value)
    assert text is not None
    back = Packing(None).unpacked(text)
    assert back == value and repr(back) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        Command(goto=[Send("a", {"messages": [HumanMessage("Hm.", id="1")]}), "b"], update={"n": (1, 2)}),
        [("messages", [AIMessage("Hm.", id="1")]), ("n", 1)],
        Overwrite([1, 2]),
        Command(resume={"a": 1}),
        {1, 2},
    ],
    ids=repr,
)
def test_what_nodes_return_comes_back(value: Any) -> None:
    packing = Packing(None)
    text = packing.packed(value)
    assert text is not None and repr(packing.unpacked(text)) == repr(value)


@dataclass
class Mine:
    """A type of a user's own."""

    number: int


class MyState(TypedDict):
    mine: Mine


def test_only_types_that_the_graphs_schemas_name_are_read_back() -> None:
    assert Packing(None).packed({"mine": Mine(3)}) is None
    named = Packing(ChoreoGraph(MyState))
    text = named.packed({"mine": Mine(3)})
    assert text is not None and named.unpacked(text) == {"mine": Mine(3)}


def test_nothing_is_unpickled() -> None:
    import base64

    written = base64.b64encode(pickle.dumps([1])).decode()
    with pytest.raises(ValueError, match="'pickle' is not read"):
        Packing(None).unpacked(f"pickle:{written}")


def test_what_stands_in_the_state_is_named_and_not_told_again() -> None:
    said, other = AIMessage("Secret.", id="1"), AIMessage("Open.", id="2")
    entry = {"handle": {"id": "h"}, "author": "ann", "message_id": "1", "select": "shared"}
    state = {"messages": [said], "handles": [{**entry}]}
    value = Command(goto=[Send("a", {"messages": [said, other], "handles": [entry]})])
    told = referring(value, state)
    assert "Secret." not in repr(told) and "Open." in repr(told)
    now = {
        "messages": [AIMessage("Now.", id="1")],
        "handles": [{"handle": {"id": "n"}, "author": "ann", "message_id": "1"}],
    }
    [sent] = resolved(told, now).goto
    assert [message.text for message in sent.arg["messages"]] == ["Now.", "Open."]
    assert sent.arg["handles"] == [{"handle": {"id": "n"}, "author": "ann", "message_id": "1", "select": "shared"}]
    with pytest.raises(LookupError):
        resolved(told, {})
    edited = referring({"messages": [AIMessage("Edited.", id="1")]}, state)
    assert edited["messages"][0].text == "Edited."


def test_confidential_words_and_thoughts_are_seen_wherever_they_stand() -> None:
    confidential = AIMessage("x", response_metadata={"choreo": {"author": "ann", "confidential": True}})
    thought = AIMessage([{"type": "reasoning", "reasoning": "x"}, {"type": "text", "text": "y"}])
    for message in (confidential, thought):
        assert hides({"messages": [message]}) and hides([Send("a", {"x": (message,)})])
        assert hides(Command(update={"messages": Overwrite([message])}))
    assert not hides({"messages": [AIMessage("x")]})
    assert tells({"n": ["x"]}) and tells(Mine("x"))  # type: ignore[arg-type]
    named = AIMessage("x", id="1")
    assert not tells({"n": [1, True, None, ""], "m": referring([named], [named])})
    assert not tells(Command(goto=["a", Send("b", {"n": 1})]))


def test_a_digests_content_does_not_tell_ids_and_handles() -> None:
    one, other = (
        {
            "messages": [AIMessage("x", id=name, response_metadata={"choreo": {"handle": name}})],
            "handles": [{"handle": {"id": name}, "author": "ann", "superstep": 1, "message_id": name, "seals": name}],
            "n": {1, 2},
        }
        for name in "ab"
    )
    assert canonical(one) == canonical(other)
    assert canonical(one) != canonical({**one, "messages": [AIMessage("y", id="a")]})
    call = {"name": "f", "args": {}, "id": "1"}
    assert canonical(AIMessage("", tool_calls=[call])) != canonical(AIMessage("", tool_calls=[call | {"id": "2"}]))
    assert canonical(ToolMessage("x", tool_call_id="1")) != canonical(ToolMessage("x", tool_call_id="2"))
