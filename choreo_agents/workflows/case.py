"""What a workflow is given to do, and what its result is worth."""

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
"""A message's tokens at most, unless told otherwise."""


class Options(BaseModel):
    """What decides the shape of a workflow."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Item(BaseModel):
    """One thing to do: a problem that is shipped, or a line of the user's file. Other fields are ignored."""

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)

    id: str = ""
    """Names it in the results; by default the number of its line."""

    @property
    def graded(self) -> bool:
        """Whether it says what would be right: then one that cannot be played is wrong."""
        return False


@dataclass(frozen=True)
class Variant:
    """One way to run a workflow."""

    method: MethodName
    """Of the engine."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """To the options."""


_NAMES: tuple[MethodName, ...] = ("choreo", "baseline", "naive")
METHODS: Mapping[str, Variant] = {name: Variant(name) for name in _NAMES}


@dataclass(frozen=True)
class Play:
    """A graph, and its input."""

    graph: ChoreoGraph
    messages: tuple[tuple[str, str], ...] = ()
    """Roles and words."""


@dataclass(frozen=True)
class Result:
    """How a play ended."""

    answer: str
    score: float | None
    """The share that is right, from 0 to 1; None if nobody knows."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further shares, by name."""


class Case(Protocol):
    """A workflow that can be run and scored."""

    name: ClassVar[str]
    """That of its function."""
    summary: ClassVar[str]
    options: ClassVar[type[Options]]
    item: ClassVar[type[Item]]
    variants: ClassVar[Mapping[str, Variant]] = METHODS
    scored: ClassVar[str] = "right"
    """What a score counts."""
    higher_is_better: ClassVar[bool] = True
    """Whether a higher score is a better one."""

    def play(self, item: Any, options: Any, prompts: Prompts, sampling: Sampling) -> Play:
        """The graph for an item."""
        ...

    def judge(self, item: Any, options: Any, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        """What the state of a finished run is worth."""
        ...


def answers_of(state: Mapping[str, Any], node: str) -> list[str]:
    """All that a node has said, in order."""
    words = {message.id: str(message.text) for message in state["messages"]}
    return [words[entry["message_id"]] for entry in state["handles"] if entry["author"] == node]
