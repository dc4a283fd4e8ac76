"""What the programs are run on, what their agents say, and in what the ported ones differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from langgraph.types import Command
from support.ported_views import Difference

from choreo_agents.testing.script import Lines

OWN: Difference = "own"
ROLES: Difference = "role"
NAMES: Difference = "name"
UNNAMED = {NAMES: "What agents say stands under their name, and the stock program sets none."}


class Run(Protocol):
    """What is done with a compiled program, stock or ported."""

    def __call__(self, app: Any, /) -> Any: ...


@dataclass(frozen=True)
class Once:
    """A user asks, in these words, and that is all."""

    words: str

    def __call__(self, app: Any, /) -> Any:
        return app.invoke({"messages": [("user", self.words)]})


def call(name: str, **arguments: Any) -> str:
    """A call of a tool, as the script's model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass(frozen=True)
class Program:
    """One of the documentation's shapes."""

    run: Run
    lines: Mapping[str, Lines]
    """What its agents say."""
    differs: Mapping[Difference, str] = field(default_factory=dict)
    """Rows of the porting table by which views differ, and where."""


def _tell(app: Any) -> None:
    """A user tells something in one thread, asks about it in another, and another user asks, too."""
    for thread, user, words in (
        ("1", "Ann", "I like red kites."),
        ("2", "Ann", "What do I like?"),
        ("3", "Bob", "What do I like?"),
    ):
        config = {"configurable": {"thread_id": thread}}
        app.invoke({"messages": [("user", words)]}, config, context={"user": user})


def _review(app: Any) -> None:
    """The draft is edited while the program waits for its review."""
    config = {"configurable": {"thread_id": "1"}}
    stopped = app.invoke({"messages": [("user", "Invite Bob for Monday.")]}, config)
    [waiting] = stopped["__interrupt__"]
    assert waiting.value == {"draft": "Come on Monday."}
    draft = stopped["messages"][-1]
    app.update_state(config, {"messages": [draft.model_copy(update={"content": "Come on Tuesday."})]})
    app.invoke(Command(resume="edited"), config)


def _talk(app: Any) -> None:
    """Two turns of a user's, the second to whom the first was handed over."""
    config = {"configurable": {"thread_id": "1"}}
    app.invoke({"messages": [("user", "A room in Rome, please.")]}, config)
    app.invoke({"messages": [("user", "And a flight to it.")]}, config)


def _joke(heard: Any) -> str:
    return f"A joke about {'kites' if 'kites' in heard.text else 'boats'}."


def _section(heard: Any) -> str:
    return "Kites are red." if "'kites'" in heard.text else "Boats are blue."


PROGRAMS: Mapping[str, Program] = {
    "map_reduce": Program(
        Once("Toys."),
        {"finder": '{"subjects": ["kites", "boats"]}', "joker": _joke, "judge": "The one about kites."},
        UNNAMED,
    ),
    "orchestrator_worker": Program(
        Once("Ann has 3 red kites. Bob has 5 blue boats. Report."),
        {"orchestrator": '{"sections": ["kites", "boats"]}', "writer": _section, "joiner": "Kites, boats."},
        UNNAMED,
    ),
    "evaluator_optimizer": Program(
        Once("A joke about kites."),
        {
            "writer": ["A kite walks in.", "A kite flies in."],
            "grader": ['{"grade": "dull", "advice": "Let it fly."}', '{"grade": "funny", "advice": ""}'],
        },
        UNNAMED,
    ),
    "supervisor": Program(
        Once("How many toys have Ann and Bob?"),
        {
            "supervisor": ['{"next": "researcher"}', '{"next": "coder"}', '{"next": "__end__"}'],
            "researcher": "Ann has 3, Bob has 5.",
            "coder": "3 + 5 = 8.",
        },
        {OWN: "The supervisor sees where it has sent control before."},
    ),
    "hierarchical_teams": Program(
        Once("A line about kites."),
        {
            "head": ['{"next": "research"}', '{"next": "writing"}', '{"next": "__end__"}'],
            "searcher": "Notes: kites are red, and so are hats.",
            "reader": "Kites are red.",
            "writer": "Kites is red.",
            "checker": "Kites are red!",
        },
        {OWN: "The head sees where it has sent control before."},
    ),
    "swarm": Program(
        _talk,
        {
            "flights": [call("to_hotels"), "Your flight is booked."],
            "hotels": ["Your room is booked.", call("to_flights")],
        },
    ),
    "react": Program(
        Once("What is (3 + 5) * 2 and 4 + 4?"),
        {"calculator": [call("add", a=3, b=5) + call("add", a=4, b=4), call("multiply", a=8, b=2), "16 and 8."]},
    ),
    "reflection": Program(
        Once("An essay about kites."),
        {"writer": ["Kites fly.", "Red kites fly.", "Red kites fly high."], "critic": ["Which kites?", "Where?"]},
        UNNAMED | {ROLES: "What the other one says stands in an assistant's turn under its name, and not in a user's."},
    ),
    "plan_and_execute": Program(
        Once("How many toys have Ann and Bob?"),
        {
            "planner": '{"steps": ["Count Ann\'s.", "Count Bob\'s."]}',
            "executor": ["Ann has 3.", "Bob has 5."],
            "replanner": ['{"steps": ["Count Bob\'s."], "answer": ""}', '{"steps": [], "answer": "8"}'],
        },
        UNNAMED | {OWN: "The replanner sees what it has planned before."},
    ),
    "human_in_the_loop": Program(
        _review, {"drafter": "Come on Monday.", "sender": "Dear Bob, come on Tuesday."}, UNNAMED
    ),
    "long_term_memory": Program(_tell, {"assistant": ["Noted.", "Red kites.", "I do not know."]}),
    "agentic_rag": Program(
        Once("Where are they that fly?"),
        {
            "asker": [call("search", words="attic"), call("search", words="kites")],
            "grader": ['{"next": "rewriter"}', '{"next": "answerer"}'],
            "rewriter": "Where are the kites?",
            "answerer": "In box 12.",
        },
        {ROLES: "The question that was asked anew stands in an assistant's turn, and not in a user's."},
    ),
}
