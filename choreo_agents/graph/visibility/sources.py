"""Who a source is, as a reader's own graph knows it."""

from __future__ import annotations

START_SOURCE = "__start__"
"""The source of input text: LangGraph's START."""
EVERYONE = "*"
"""Every node of a reader's graph that is not declared otherwise, but for those whose messages are confidential."""


def source_of_author(author: str, reader: str) -> str | None:
    """An author as a reader's own graph knows it: a node of it, START, or None for one outside of it.

    To `closer`, all that `team|pro` and `team|judge` said comes from the node `team`. To `team|judge`, what `pro`
    outside said has no source that its graph could declare.
    """
    if author == START_SOURCE:
        return author
    path, home = author.split("|"), reader.split("|")[:-1]
    return path[len(home)] if path[: len(home)] == home and len(path) > len(home) else None
