"""Who a source is, as a reader's own graph knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

START_SOURCE = "__start__"
"""The source of input text: LangGraph's START."""
EVERYONE = "*"
"""Every node of a reader's graph that is not declared otherwise, but for those whose messages are confidential."""


OUTSIDE = "||"
"""Before the path of a source that stands outside of a reader's graph; no node can be named so."""


def source_in(rules: Mapping[str, Any], author: str, reader: str) -> str | None:
    """An author as a reader's rules know it: also one outside of its graph, if a graph around says what it sees."""
    if (source := source_of_author(author, reader)) is not None:
        return source
    parts = author.split("|")
    names = (OUTSIDE + "|".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((name for name in names if name in rules), None)


def source_of_author(author: str, reader: str) -> str | None:
    """An author as a reader's own graph knows it: a node of it, START, or None for one outside of it.

    To `closer`, all that `team|pro` and `team|judge` said comes from the node `team`. To `team|judge`, what `pro`
    outside said has no source that its graph could declare.
    """
    if author == START_SOURCE:
        return author
    path, home = author.split("|"), reader.split("|")[:-1]
    return path[len(home)] if path[: len(home)] == home and len(path) > len(home) else None
