"""What a fork changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from langchain_core.messages import AnyMessage, BaseMessage, HumanMessage, convert_to_messages

from choreo_agents.engine.recording.format import RecordedCall, Recording
from choreo_agents.errors import InvalidRequestError

_MEANT = "run.seed, input, NODE.system, NODE.prompt or NODE:NUMBER.words"


@dataclass(frozen=True)
class Changes:
    """What is set."""

    systems: Mapping[str, str] = field(default_factory=dict)
    """What agents are told, by node or persona, behind the subgraphs that they stand in."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    given: Any = None
    """The input; text is what it asks."""
    words: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """What is said, by agent and which of its calls, from 1."""


def changes_of(given: Mapping[str, Any]) -> Changes:
    """What a fork is told to set.

    Args:
        given: `run.seed`, `input`, `NODE.system`, `NODE.prompt` or `NODE:NUMBER.words`, and to what.

    Raises:
        InvalidRequestError: It is none of these.
    """
    systems: dict[str, str] = {}
    prompts: dict[str, str] = {}
    words: dict[tuple[str, int], str] = {}
    seed: int | None = None
    entered: Any = None
    for name, value in given.items():
        whose, dot, what = name.rpartition(".")
        if name == "input":
            entered = value
        elif name == "run.seed":
            seed = _seed(value)
        elif dot and what in ("system", "prompt", "words") and isinstance(value, str):
            if what == "words":
                words[numbered(whose)] = value
            else:
                (systems if what == "system" else prompts)[whose] = value
        else:
            raise InvalidRequestError(f"a fork can set {_MEANT}, each to text, not {name!r} to {value!r}")
    return Changes(systems, prompts, seed, entered, words)


def numbered(text: str) -> tuple[str, int]:
    """An agent and which of its calls, from 1; raises `InvalidRequestError`."""
    author, colon, number = text.rpartition(":")
    if not colon or not author or not number.isdecimal() or not int(number):
        raise InvalidRequestError(f"name a call as NODE:NUMBER, from 1 on, as in judge:1, not {text!r}")
    return author, int(number)


def call_named(recording: Recording, author: str, number: int) -> RecordedCall:
    """Which call of an agent that is, in the order of runs and supersteps; raises `InvalidRequestError`."""
    said = _in_order(each for each in recording.calls() if each.author == author)
    if not said:
        there = ", ".join(sorted({each.author for each in recording.calls()})) or "nobody"
        raise InvalidRequestError(f"{author!r} does not speak in {str(recording.path)!r}: {there} do")
    if number > len(said):
        raise InvalidRequestError(f"{author!r} speaks {len(said)} times in {str(recording.path)!r}, not {number}")
    return said[number - 1]


def given_otherwise(recorded: Any, value: Any) -> Any:
    """The input of a run with other words: text takes the place of its last message's."""
    if not isinstance(value, str):
        return value
    before = recorded.get("messages") if isinstance(recorded, Mapping) else None
    if before is None and recorded is not None and not isinstance(recorded, Mapping):
        raise InvalidRequestError(
            f"the input of the run is a {type(recorded).__name__}, whose words cannot be set: give another input"
        )
    messages: list[BaseMessage | AnyMessage] = [*convert_to_messages(before or [])]
    changed = messages[-1].model_copy(update={"content": value}) if messages else HumanMessage(value)
    return {**(recorded or {}), "messages": [*messages[:-1], changed]}


def _in_order(said: Iterable[RecordedCall]) -> list[RecordedCall]:
    """As they were said, but for branches of one superstep: whichever of them is the first to end is left to time."""
    supersteps = groupby(sorted(said, key=lambda call: call.run), lambda call: (call.run, call.superstep, call.step))
    return [call for _, group in supersteps for call in sorted(group, key=lambda call: (call.branch, call.call))]


def _seed(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise InvalidRequestError(f"run.seed must be an integer, not {value!r}") from None
