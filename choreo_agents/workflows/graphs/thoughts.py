"""The state of a tree of thoughts: which thoughts stand for election, and which are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict

from choreo_agents.graph import START, ChoreoState, HandleEntry
from choreo_agents.graph.visibility import Mode, mode_of

THINKER, VOTER = "thinker", "voter"
Thought = list[str]
"""A thought from its first level on, as message ids."""


class TreeState(ChoreoState, total=False):
    """A tree's channels, besides handles and messages."""

    candidates: list[Thought]
    kept: list[Thought]
    thoughts: int
    """Messages that candidates have said, on all levels so far."""
    before: int
    """Entries of the `handles` channel when the tree began: a thread may hold trees that came before."""


def begin(state: Mapping[str, Any]) -> dict[str, Any]:
    """A tree without any thought."""
    return {"candidates": [], "kept": [], "thoughts": 0, "before": len(state.get("handles") or [])}


def stand(state: Mapping[str, Any], branches: int) -> dict[str, Any]:
    """What a level's messages make of the state: each goes on from one of the thoughts that were kept."""
    said = [entry["message_id"] for entry in state["handles"][state["before"] :] if _node(entry) == THINKER]
    new, kept = said[state["thoughts"] :], state["kept"] or [[]]
    candidates = [[*kept[index // branches], message] for index, message in enumerate(new)]
    return {"candidates": candidates, "thoughts": len(said)}


def numbered(state: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The level's candidates: which of all messages each is, from 0 on, and its words."""
    words = {message.id: str(message.text) for message in state["messages"]}
    first = state["thoughts"] - len(state["candidates"])
    return [(first + index, words.get(thought[-1], "")) for index, thought in enumerate(state["candidates"])]


def votes(state: Mapping[str, Any], nodes: Sequence[str], count: int) -> list[str]:
    """The last `count` messages of the voting nodes."""
    words = {message.id: str(message.text) for message in state["messages"]}
    cast = [entry["message_id"] for entry in state["handles"] if _node(entry) in nodes]
    return [words.get(message, "") for message in cast[-count:]]


def _node(entry: HandleEntry) -> str:
    """Who said it, whatever graphs it stands in."""
    return entry["author"].rpartition("|")[2]


class Sent(TypedDict):
    """What a branch sees, as message ids."""

    shared: list[str]
    reencoded: list[str]


def sent(state: Mapping[str, Any], thoughts: Sequence[Thought], visibility: Mode) -> Sent:
    """What a branch is sent to see these thoughts and nothing else but the input."""
    inputs = [entry["message_id"] for entry in state["handles"] if entry["author"] == START]
    chosen = list(dict.fromkeys(message for thought in thoughts for message in thought))
    if mode_of(visibility).hands_on_encodings:
        return Sent(shared=[*inputs, *chosen], reencoded=[])
    return Sent(shared=inputs, reencoded=chosen)
