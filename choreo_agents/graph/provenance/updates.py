"""Updates of a graph's state, in all forms that LangGraph takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages
from langgraph.types import Command
from pydantic import BaseModel

Change = Callable[[Any], Any]
"""Makes of what is written to a channel what is to be written."""


def rewritten(update: Any, changes: Mapping[str, Change]) -> Any:
    """An update in the form that it has, with other values for some channels.

    Args:
        update: Of the state.
        changes: By channel; channels that it does not write stay out.
    """
    if isinstance(update, Command):
        return dataclasses.replace(update, update=rewritten(update.update, changes))
    if isinstance(update, Mapping):
        return {**update, **{name: change(update[name]) for name, change in changes.items() if name in update}}
    if isinstance(update, list | tuple):
        parts = [_pair(part, changes) or rewritten(part, changes) for part in update]
        return parts if isinstance(update, list) else tuple(parts)
    if isinstance(update, BaseModel):
        fields = [name for name in changes if name in type(update).model_fields]
        return update.model_copy(update={name: changes[name](getattr(update, name)) for name in fields})
    if dataclasses.is_dataclass(update) and not isinstance(update, type):
        written = [name for name in changes if hasattr(update, name)]
        return dataclasses.replace(update, **{name: changes[name](getattr(update, name)) for name in written})
    return update


def listed_messages(written: Any) -> Sequence[BaseMessage]:
    """What was written to a messages channel, as messages.

    Raises:
        ValueError: It is no message; as is `NotImplementedError`.
    """
    return convert_to_messages(written if isinstance(written, list) else [written])


def _pair(part: Any, changes: Mapping[str, Change]) -> tuple[str, Any] | None:
    """A (channel, value) pair of a channel that changes; None for anything else."""
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str) and part[0] in changes:
        return part[0], changes[part[0]](part[1])
    return None
