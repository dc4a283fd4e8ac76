"""Who sees whom in random graphs in graphs: with namesakes, threads of their own, and LangGraph's own graphs."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from langgraph.checkpoint.memory import InMemorySaver
from support.visible_graphs import Nest, nests

from choreo_agents import START
from choreo_agents.testing import Script

# Declared-private pairs are broken on purpose here: the audit is asked, not obeyed.
pytestmark = pytest.mark.filterwarnings("ignore::choreo_agents.errors.VisibilityWarning")


@given(nests())
@settings(max_examples=30)
def test_everyone_sees_what_edges_give_and_nobody_more_than_the_audit_says(nest: Nest) -> None:
    """Two turns of a thread: each view holds the words of those whom the declarations show, at whatever depth."""
    numbers = count()
    script = Script(
        default=lambda call: f"{call.agent} {next(numbers)}"
    )  # equal words in an equal place are one message
    with script.load() as engine:
        app = nest.graph(engine).compile(InMemorySaver(), engine=engine)
        config: Any = {"configurable": {"thread_id": "t"}}
        known = {(each.context, each.reader, each.channel) for each in app.audit().findings}
        for turn in ("one", "two"):
            state = app.invoke({"messages": [("user", turn)]}, config)
            found = {(each.context, each.reader, each.channel) for each in app.audit(state).findings}
            assert found <= known, f"not foreseen: {found - known}"
        said: set[str] = set()
        speakers, calls = [*nest.speakers()] * 2, iter(script.calls)
        for reader, speaks in speakers:
            if not speaks:
                said.add(reader)
                continue
            call = next(calls)
            assert call.agent == reader
            seen = {str(message.author) for message in call.messages} - {"public root", f"{reader}.system"}
            shown = {author for author in said if nest.shows(author.split("|"), reader.split("|"))}
            assert seen == shown | ({START} if nest.shows([], reader.split("|")) else set()), reader
            said.add(reader)
        assert not [*calls]
        engine.check()
