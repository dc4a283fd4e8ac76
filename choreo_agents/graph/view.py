"""Which entries one reader sees, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import START_SOURCE, Mode, Rule


def visible(entries: Sequence[HandleEntry], reader: str, rules: Mapping[str, Rule]) -> list[tuple[HandleEntry, Mode]]:
    """A reader's view: by superstep; within one, input first, then its own, then sources in declared order.

    Its own messages are always there, shared; those of undeclared and private sources never are. The order of
    `entries` does not matter.
    """
    rank = {source: i for i, source in enumerate(rules, start=1)}
    rank[START_SOURCE] = -1
    rank[reader] = 0
    seen: list[tuple[HandleEntry, Mode]] = []
    for source in {entry["author"] for entry in entries}:
        said = [entry for entry in entries if entry["author"] == source]
        rule = Rule() if source == reader else rules.get(source)
        if rule is not None and rule.mode != "private":
            seen.extend((entry, rule.mode) for entry in _recent(said, rule))
    return sorted(
        seen,
        key=lambda pair: (pair[0]["superstep"], rank[pair[0]["author"]], pair[0]["branch"], pair[0]["message_id"]),
    )


def _recent(said: list[HandleEntry], rule: Rule) -> list[HandleEntry]:
    """The entries of the last supersteps in which a source spoke, as many as the rule's history keeps."""
    if rule.history == "all":
        return said
    keep = 1 if rule.history == "last" else rule.history
    supersteps = sorted({entry["superstep"] for entry in said})[-keep:]
    return [entry for entry in said if entry["superstep"] in supersteps]
