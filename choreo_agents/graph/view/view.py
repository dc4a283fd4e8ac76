"""Which entries one reader sees, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import EVERYONE, START_SOURCE, Rule, mode_of, source_of_author

_OWN = "|own"
"""The source of what a reader's own persona said; no node can be named so."""


class SeenEntry(NamedTuple):
    """An entry of a view, and how its reader sees it."""

    entry: HandleEntry
    rule: Rule


def visible(
    entries: Sequence[HandleEntry],
    reader: str,
    rules: Mapping[str, Rule],
    persona: str | None = None,
    undeclared: Collection[str] | None = None,
) -> list[SeenEntry]:
    """A reader's view: by superstep; within one, input first, then its own, then sources in declared order.

    The messages of its own persona are always there, shared; those of private sources never are, nor those of sources
    without a rule. The order of `entries` does not matter.

    Args:
        entries: All that was said.
        reader: The node that reads, behind its subgraphs, and `persona` whose node it is; by default its own.
        rules: Its sources.
        undeclared: If it reads everyone, whom it does not name: without their confidential messages. Then those of one
            superstep stand by name, its own among them, as LangGraph applies what nodes of a superstep say.

    Raises:
        VisibilityError: A `send` hands on more than the reader may see.
    """
    rank: dict[str | None, int] = {START_SOURCE: -1, _OWN: 0}
    if undeclared is None:
        rank = {**{source: i for i, source in enumerate(rules, start=1)}, **rank}
    by_source: dict[str | None, list[HandleEntry]] = {}
    for entry in entries:
        says = entry.get("unproven")
        if says is not None and (START_SOURCE not in rules or not rules[START_SOURCE].mode.shows):
            continue  # it is input, whatever it says
        if (via := _rule_of(entry.get("via"), reader, rules)) is not None and not via.mode.shows:
            continue  # nobody who must not read the node that wrote it reads it
        own = is_own(entry, reader, persona or reader)
        source = _OWN if own else source_of_author(says["author"] if says else entry["author"], reader)
        by_source.setdefault(source, []).append(entry)
    seen: list[tuple[int, SeenEntry]] = []
    for source, said in by_source.items():
        rule = Rule() if source == _OWN else None if source is None else rules.get(source, rules.get(EVERYONE))
        named = undeclared is None or source == _OWN or (source in rules and source not in undeclared)
        readable = said if named else [entry for entry in said if not entry["confidential"]]
        shown = set() if rule is None or not rule.mode.shows else {id(entry) for entry in _recent(readable, rule)}
        shown = {id(entry) for entry in said if id(entry) in shown and _kept(entry, rule)}
        for entry in said:
            if id(entry) in shown or entry.get("select"):
                narrowed = _narrowed(entry, rule if id(entry) in shown else None, source, reader)
                narrowed = _narrowest(narrowed, rules) if entry.get("unproven") else narrowed
                via = _rule_of(entry.get("via"), reader, rules)
                if via is not None and narrowed.mode.hands_on_encodings:
                    narrowed = replace(narrowed, mode=via.mode)
                seen.append((rank.get(source, 0), SeenEntry(entry, narrowed)))
    seen.sort(key=_place)
    return [item for _, item in seen]


def _rule_of(node: str | None, reader: str, rules: Mapping[str, Rule]) -> Rule | None:
    """What is declared of the node that has written a tool's result; None: nothing."""
    return None if node is None else rules.get(source_of_author(node, reader) or "")


def is_own(entry: HandleEntry, reader: str, persona: str) -> bool:
    """Whether a reader's own persona said it, or, where no signature proves who did, says that it has."""
    says = entry.get("unproven") or entry
    return says["author"] == reader or says.get("persona") == persona


def _narrowest(rule: Rule, rules: Mapping[str, Rule]) -> Rule:
    """The rule for input that says to be a source's: no more than what its reader has of both."""
    return rules[START_SOURCE] if rule.mode.hands_on_encodings else rule


def _kept(entry: HandleEntry, rule: Rule | None) -> bool:
    """Whether a rule's history keeps an entry that a `send` has selected, for all that the branch was not sent."""
    most = {"all": None, "last": 1}.get(str(rule.history), rule.history) if rule is not None else None
    return not isinstance(most, int) or entry.get("behind", 0) < most


def _narrowed(entry: HandleEntry, rule: Rule | None, source: str | None, reader: str) -> Rule:
    """The rule for an entry that a `send` may have selected: never more than the source's."""
    selected = entry.get("select")
    mode = None if rule is None else rule.mode.narrowed(mode_of(selected)) if selected else rule.mode
    if rule is None or mode is None:
        node = reader.rsplit("|", maxsplit=1)[-1]
        allowed = "nothing" if rule is None else rule.words()
        raise VisibilityError(
            f"a send hands a message of {source or entry['author']!r} to {node!r} as {selected!r}, which may see "
            f"{allowed} of it: declare {source or entry['author']!r} to {node!r} {selected!r}, or send less"
        )
    return replace(rule, mode=mode)


def _recent(said: list[HandleEntry], rule: Rule) -> list[HandleEntry]:
    """The entries of the last supersteps in which a source spoke, as many as the rule's history keeps."""
    if rule.history == "all":
        return said
    keep = 1 if rule.history == "last" else rule.history
    supersteps = sorted({entry["superstep"] for entry in said})[-keep:]
    return [entry for entry in said if entry["superstep"] in supersteps]


def call_of(entry: HandleEntry) -> tuple[str, list[int], int, int]:
    """Which of the calls of its superstep an entry is of: branches stand as they were sent."""
    return entry["author"], entry.get("around", []), entry["branch"], entry.get("call", 0)


def _place(item: tuple[int, SeenEntry]) -> tuple[int, int, tuple[str, list[int], int, int], str]:
    """What decides where an entry stands; the message id only between what nothing else tells apart."""
    rank, (entry, _) = item
    return entry["superstep"], rank, call_of(entry), entry["message_id"]
