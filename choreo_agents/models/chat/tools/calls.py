"""What a model says that may call tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class ToolCall:
    """A call that can be made."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON-plain, by parameter."""
    id: str = ""
    """By which its result names it; a reader gives none."""


@dataclass(frozen=True)
class BrokenCall:
    """Something that was to be a call, and cannot be read as one."""

    name: str | None
    """The tool's, as far as it was said."""
    text: str
    """All that was written of it."""
    why: str


class SaidWords(NamedTuple):
    """SaidWords as they come."""

    text: str


class CallPart(NamedTuple):
    """A call, once it is known to be one, or to be none."""

    number: int
    """Which of the message's calls."""
    name: str | None
    arguments: str
    """As JSON; of what is no call, all that was written of it."""
