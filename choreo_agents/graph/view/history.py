"""How much of what was said an agent sees, its own messages among it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.view.view import SeenEntry
from choreo_agents.graph.words.told import required_arguments

Summary = Callable[..., str | Awaitable[str | None] | None]
"""Of the messages that an agent no longer sees: text that it is told in their place; None: nothing."""


@refuses_unknown()
@dataclass(frozen=True)
class Keep:
    """What an agent sees of its view: the latest messages, its own among them, and instructions in any case.

    A call and its results are kept together, or not at all.

    What was kept as it was encoded has attended to what came before it, and goes on to say so: a bound on the view is a
    bound on what a call costs, not on what it can know.
    """

    last: int | None = None
    """So many messages; of the latest call all results, though they be more. 0: none, its own among them; what it is
    asked says all that it is to know."""
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
        self,
        seen: Sequence[SeenEntry],
        length: Callable[[SeenEntry], int],
        instructs: Callable[[SeenEntry], bool],
        calls: Mapping[str, str],
    ) -> tuple[list[SeenEntry], list[SeenEntry]]:
        """What is kept of a view, and what is not, both in its order.

        Args:
            seen: The view.
            length: Of a message, in positions.
            instructs: Whether it gives instructions.
            calls: By a result's message that of its call: both are kept, or neither.
        """
        together: dict[str, list[SeenEntry]] = {}
        for each in reversed(seen):
            if not instructs(each):
                together.setdefault(calls.get(each.entry["message_id"], each.entry["message_id"]), []).append(each)
        chosen = {id(each.entry) for each in seen if instructs(each)}
        kept = length_kept = 0
        for unit in together.values():
            # Who may see one message sees the latest, and if that is a result, its call and all that it came with.
            most = self.last if kept or not self.last else max(self.last, len(unit))
            kept += len(unit)
            length_kept += 0 if self.tokens is None else sum(map(length, unit))
            if (most is not None and kept > most) or (self.tokens is not None and length_kept > self.tokens):
                break
            chosen |= {id(each.entry) for each in unit}
        return [e for e in seen if id(e.entry) in chosen], [e for e in seen if id(e.entry) not in chosen]


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
