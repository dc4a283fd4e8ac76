"""The interface of a runnable workflow: its options, its input items, how it is run, and how its result is scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:  # commands list the cases' options: neither torch nor LangGraph is needed for that
    from choreo_agents import sampling
    from choreo_agents.engine.settings import MethodName
    from choreo_agents.graph import ChoreoGraph
    from choreo_agents.workflows import phrasing

Prompts: TypeAlias = "phrasing.Prompts"
Sampling: TypeAlias = "sampling.Sampling"
EMBEDDED_TOKENS, CHAT_TOKENS = 96, 512
"""Most tokens of a message by default, for the embedded model and for others."""


class Options(BaseModel):
    """Options that decide the shape of a workflow's graph."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Item(BaseModel):
    """An input of a workflow: a bundled problem or a line of the user's file. Unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)

    id: str = ""
    """Key of the item in the results; by default its line number."""

    @property
    def graded(self) -> bool:
        """True if the item has a right answer: then a run that fails scores 0."""
        return False


@dataclass(frozen=True)
class Variant:
    """Way to run a workflow: an engine method and overrides of options."""

    method: MethodName
    """The engine's method."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Values of options that the variant sets."""


_NAMES: tuple[MethodName, ...] = ("choreo", "baseline", "naive")


def methods(**changes: Mapping[str, Any]) -> Mapping[str, Variant]:
    """Return the engine's methods by their names, and choreo with other options by names of their own."""
    ours = {name: Variant("choreo", options) for name, options in changes.items()}
    return {**{name: Variant(name) for name in _NAMES}, **ours}


@dataclass(frozen=True)
class Play:
    """A graph and its input messages."""

    graph: ChoreoGraph
    messages: tuple[tuple[str, str], ...] = ()
    """Roles and texts."""


@dataclass(frozen=True)
class Result:
    """The final answer of a run and its score."""

    answer: str
    score: float | None
    """Share that is right, from 0 to 1; None if the item has no right answer."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further scores, by name."""


class Case(Protocol):
    """A workflow that can be run and scored."""

    name: ClassVar[str]
    """Name of the function that builds its graph."""
    summary: ClassVar[str]
    options: ClassVar[type[Options]]
    item: ClassVar[type[Item]]
    variants: ClassVar[Mapping[str, Variant]] = methods()
    scored: ClassVar[str] = "right"
    """Label of the score."""
    higher_is_better: ClassVar[bool] = True
    """Whether a higher score is a better one."""

    def play(self, item: Any, options: Any, prompts: Prompts, sampling: Sampling) -> Play:
        """Return the graph and the input messages for an item."""
        ...

    def judge(self, item: Any, options: Any, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        """Score the end state of a run."""
        ...


def turns_of(state: Mapping[str, Any], since: int = 0) -> list[tuple[str, str]]:
    """Return node and text of each message of a state, in order; nodes without the names of subgraphs.

    Args:
        state: State of a graph.
        since: Number of entries of the `handles` channel that are left out.
    """
    words = {message.id: str(message.text) for message in state["messages"]}
    entries = state["handles"][since:]
    return [(entry["author"].rpartition("|")[2], words.get(entry["message_id"], "")) for entry in entries]


def answers_of(state: Mapping[str, Any], *nodes: str) -> list[str]:
    """Return the texts of all messages of some nodes, in order."""
    return [words for node, words in turns_of(state) if node in nodes]
