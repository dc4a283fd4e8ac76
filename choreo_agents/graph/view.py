"""Which entries one reader sees, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import START_SOURCE, Mode, Rule


def source_of_author(author: str, reader: str) -> str | None:
    """An author as a reader's own graph knows it: a node of it, START, or None for one outside of it.

    To `closer`, all that `team|pro` and `team|judge` said comes from the node `team`. To `team|judge`, what `pro`
    outside said has no source that its graph could declare.
    """
    if author == START_SOURCE:
        return author
    path, home = author.split("|"), reader.split("|")[:-1]
    return path[len(home)] if path[: len(home)] == home and len(path) > len(home) else None


def visible(entries: Sequence[HandleEntry], reader: str, rules: Mapping[str, Rule]) -> list[tuple[HandleEntry, Mode]]:
    """A reader's view: by superstep; within one, input first, then its own, then sources in declared order.

    Its own messages are always there, shared; those of undeclared and private sources never are. The order of
    `entries` does not matter.
    """
    rank = {source: i for i, source in enumerate(rules, start=1)}
    rank[START_SOURCE] = -1
    by_source: dict[str, list[HandleEntry]] = {}
    for entry in entries:
        source = source_of_author(entry["author"], reader)
        if source is not None:
            by_source.setdefault(source, []).append(entry)
    own = reader.rsplit("|", maxsplit=1)[-1]
    rank[own] = 0
    seen: list[tuple[int, HandleEntry, Mode]] = []
    for source, said in by_source.items():
        rule = Rule() if source == own else rules.get(source)
        if rule is not None and rule.mode != "private":
            seen.extend((rank[source], entry, rule.mode) for entry in _recent(said, rule))
    seen.sort(key=_place)
    return [(entry, mode) for _, entry, mode in seen]


def _recent(said: list[HandleEntry], rule: Rule) -> list[HandleEntry]:
    """The entries of the last supersteps in which a source spoke, as many as the rule's history keeps."""
    if rule.history == "all":
        return said
    keep = 1 if rule.history == "last" else rule.history
    supersteps = sorted({entry["superstep"] for entry in said})[-keep:]
    return [entry for entry in said if entry["superstep"] in supersteps]


def _place(item: tuple[int, HandleEntry, Mode]) -> tuple[int, int, str, int, int, str]:
    """What decides where an entry stands; the message id only between what nothing else tells apart."""
    rank, entry, _ = item
    return entry["superstep"], rank, entry["author"], entry["branch"], entry.get("call", 0), entry["message_id"]
