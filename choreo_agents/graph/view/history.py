"""How much of what was said an agent sees, its own messages among it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.view.view import SeenEntry
from choreo_agents.graph.words.told import required_arguments

Summary = Callable[..., str | Awaitable[str | None] | None]
"""Of the messages that an agent no longer sees: text that it is told in their place; None: nothing."""


@dataclass(frozen=True)
class Keep:
    """What an agent sees of its view: the latest messages, its own among them, and instructions in any case.

    What was kept as it was encoded has attended to what came before it, and goes on to say so: a bound on the view is a
    bound on what a call costs, not on what it can know.
    """

    last: int | None = None
    """So many messages. 0: none, its own among them; what it is asked says all that it is to know."""
    tokens: int | None = None
    """As many messages as take so many positions."""
    summary: Summary | None = None
    """What is told in place of the others, made anew for each call; a private context of the agent's."""

    def __post_init__(self) -> None:
        for name, least in (("last", 0), ("tokens", 1)):
            bound = getattr(self, name)
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < least):
                raise InvalidRequestError(f"a history keeps {name} from {least} on, not {bound!r}")
        if self.last is None and self.tokens is None:
            raise InvalidRequestError("a history says what it keeps: Keep(last=...) or Keep(tokens=...)")

    def split(
        self, seen: Sequence[SeenEntry], length: Callable[[SeenEntry], int], instructs: Callable[[SeenEntry], bool]
    ) -> tuple[list[SeenEntry], list[SeenEntry]]:
        """What is kept of a view, and what is not, both in its order."""
        kept: list[SeenEntry] = []
        left, room, is_full = self.last, self.tokens, False
        for each in reversed(seen):
            if instructs(each):
                kept.append(each)
                continue
            if not is_full and room is not None:
                room -= length(each)
            is_full = is_full or left == 0 or (room is not None and room < 0)
            if not is_full:
                kept.append(each)
                left = None if left is None else left - 1
        kept.reverse()
        chosen = {id(each.entry) for each in kept}
        return kept, [each for each in seen if id(each.entry) not in chosen]


def required_history(name: str, history: Any) -> Keep | None:
    """How an agent's view is bounded; raises `InvalidRequestError` if it is not said how."""
    if isinstance(history, int) and not isinstance(history, bool):
        history = Keep(last=history)
    if history is not None and not isinstance(history, Keep):
        raise InvalidRequestError(f"the history of {name!r} must be a number of messages or a Keep, not {history!r}")
    if history is not None and history.summary is not None:
        required_arguments(name, "summary", history.summary, ["messages", "state"])
    found: Keep | None = history
    return found
