"""Says whose messages take most of a view that is longer than the model's context, and what would make them fewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from choreo_agents.errors import ContextLengthError
from choreo_agents.graph.by_model import length_for
from choreo_agents.graph.view.view import SeenEntry, is_own
from choreo_agents.graph.visibility import START_SOURCE, source_of_author


def advised(
    error: ContextLengthError, seen: Iterable[SeenEntry], author: str, persona: str, model: str
) -> ContextLengthError:
    """The same error with what would make the largest source of a view smaller.

    Args:
        error: Which the view has met.
        seen: What is in it.
        author: Whose view it is, and the `persona` whose node that is.
        model: The fingerprint of its model.
    """
    tokens: Counter[str] = Counter()
    reader = author.rsplit("|", maxsplit=1)[-1]
    for entry, _ in seen:
        own = is_own(entry, author, persona)
        source = reader if own else source_of_author(entry["author"], author) or entry["author"]
        tokens[source] += length_for(entry, model)
    if not tokens:
        return error
    [(source, count)] = tokens.most_common(1)
    what = "its own" if source == reader else f"{source!r}'s"
    advice = f"declare {source!r} to {reader!r} with history='last', or shorten the loop that both are in"
    if source == reader:
        advice = "bound what it keeps by Agent(history=...), or shorten the loop that it is in"
    elif source == START_SOURCE:
        what, advice = "input", "send less"
    return ContextLengthError(f"{error}. In the view of {reader!r}, {count} tokens are {what}: {advice}")
