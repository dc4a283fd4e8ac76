"""Which entries one reader sees, in which order, and how many of them: plain data, and no engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import EVERYONE, START_SOURCE, VisibilityRule, mode_of, source_in
from choreo_agents.graph.words.prompts import required_arguments

Summary = Callable[..., str | Awaitable[str | None] | None]
"""Of the messages that an agent no longer sees: text that it is told in their place; None: nothing."""
_OWN = "|own"
"""The source of what a reader's own persona said; no node can be named so."""


class SeenEntry(NamedTuple):
    """An entry of a view, and how its reader sees it."""

    entry: HandleEntry
    rule: VisibilityRule


def visible(
    entries: Sequence[HandleEntry],
    reader: str,
    rules: Mapping[str, VisibilityRule],
    persona: str | None = None,
    undeclared: Collection[str] | None = None,
    unnamed: Collection[str] = (),
    calls: Mapping[str, str] = MappingProxyType({}),
) -> list[SeenEntry]:
    """A reader's view: by superstep; within one, input first, then its own, then sources in declared order.

    The messages of its own persona are always there, shared; those of private sources never are, nor those of sources
    without a rule. The order of `entries` does not matter.

    Args:
        entries: All that was said.
        reader: The node that reads, behind its subgraphs, and `persona` whose node it is; by default its own.
        rules: Its sources.
        unnamed: Sources outside of its graph whose confidential messages are not for it.
        undeclared: If it reads everyone, whom it does not name: without their confidential messages. Then those of one
            superstep stand by name, its own among them, as LangGraph applies what nodes of a superstep say.
        calls: By a result's message that of its call: a history counts both as said when the call was, and keeps both
            or neither.

    Raises:
        VisibilityError: A `send` hands on more than the reader may see.
    """
    rank: dict[str | None, int] = {START_SOURCE: -1, _OWN: 0}
    if undeclared is None:
        rank = {**{source: i for i, source in enumerate(rules, start=1)}, **rank}
    by_source: dict[str | None, list[HandleEntry]] = {}
    for entry in entries:
        says = entry.get("unverified_author")
        if says is not None and (START_SOURCE not in rules or not rules[START_SOURCE].mode.shows):
            continue  # it is input, whatever it says
        if (via := _rule_of(entry.get("tool_node"), reader, rules)) is not None and not via.mode.shows:
            continue  # nobody who must not read the node that wrote it reads it
        own = is_own(entry, reader, persona or reader)
        source = _OWN if own else source_in(rules, says["author"] if says else entry["author"], reader)
        by_source.setdefault(source, []).append(entry)
    seen: list[tuple[int, SeenEntry]] = []
    cut: set[str] = set()
    for source, said in by_source.items():
        rule = (
            VisibilityRule() if source == _OWN else None if source is None else rules.get(source, rules.get(EVERYONE))
        )
        named = undeclared is None or source == _OWN or (source in rules and source not in undeclared)
        named = named and source not in unnamed
        shows = rule is not None and rule.mode.shows
        readable = [entry for entry in said if shows and (named or not entry["confidential"])]
        shown = {id(entry) for entry in _recent(readable, rule, calls)}
        cut |= {_unit(entry, calls) for entry in readable if id(entry) not in shown}
        for entry in said:
            if id(entry) in shown or entry.get("select"):
                narrowed = _narrowed(entry, rule if id(entry) in shown else None, source, reader)
                if entry.get("unverified_author") and narrowed.mode.shares_kv:
                    narrowed = rules[START_SOURCE]  # no more than what its reader has of input
                via = _rule_of(entry.get("tool_node"), reader, rules)
                if via is not None and narrowed.mode.shares_kv:
                    narrowed = replace(narrowed, mode=via.mode)
                seen.append((rank.get(source, 0), SeenEntry(entry, narrowed)))
    seen.sort(key=_place)
    return [item for _, item in seen if _unit(item.entry, calls) not in cut]


def _rule_of(node: str | None, reader: str, rules: Mapping[str, VisibilityRule]) -> VisibilityRule | None:
    """What is declared of the node that has written a tool's result; None: nothing."""
    return None if node is None else rules.get(source_in(rules, node, reader) or "")


def is_own(entry: HandleEntry, reader: str, persona: str) -> bool:
    """Whether a reader's own persona said it, or, where no signature proves who did, says that it has."""
    says = entry.get("unverified_author") or entry
    return says["author"] == reader or says.get("persona") == persona


def _narrowed(entry: HandleEntry, rule: VisibilityRule | None, source: str | None, reader: str) -> VisibilityRule:
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


def _recent(said: list[HandleEntry], rule: VisibilityRule | None, calls: Mapping[str, str]) -> list[HandleEntry]:
    """The entries of the last supersteps in which a source spoke, as many as the rule's history keeps.

    What a `send` has selected says how many there were since, for all that the branch was not sent.
    """
    if rule is None or rule.history == "all":
        return said
    keep = 1 if rule.history == "last" else rule.history
    at = said_at(said, calls)
    latest = sorted(set(at.values()))[-keep:]
    return [entry for entry in said if at[entry["message_id"]] in latest and entry.get("behind", 0) < keep]


def said_at(entries: Sequence[HandleEntry], calls: Mapping[str, str]) -> dict[str, int]:
    """Return the supersteps in which messages count as said: results when their call was, as far as it is there."""
    supersteps = {entry["message_id"]: entry["superstep"] for entry in entries}
    return {name: supersteps.get(calls.get(name, name), at) for name, at in supersteps.items()}


def _unit(entry: HandleEntry, calls: Mapping[str, str]) -> str:
    """Name what is seen as a whole or not at all: a call with its results, or any other message."""
    return calls.get(entry["message_id"], entry["message_id"])


def call_of(entry: HandleEntry) -> tuple[str, list[int], int, int]:
    """Which of the calls of its superstep an entry is of: branches stand as they were sent."""
    return entry["author"], entry.get("task_path", []), entry["branch"], entry.get("call", 0)


def _place(item: tuple[int, SeenEntry]) -> tuple[int, int, tuple[str, list[int], int, int], str]:
    """What decides where an entry stands; the message id only between what nothing else tells apart."""
    rank, (entry, _) = item
    return entry["superstep"], rank, call_of(entry), entry["message_id"]


# How much of that it keeps, its own messages among it


@refuses_unknown()
@dataclass(frozen=True)
class HistoryLimit:
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
            raise InvalidRequestError(
                "a history says what it keeps: HistoryLimit(last=...) or HistoryLimit(tokens=...)"
            )

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


def required_history(name: str, history: object) -> HistoryLimit | None:
    """How an agent's view is bounded; raises `InvalidRequestError` if it is not said how."""
    if isinstance(history, int) and not isinstance(history, bool):
        history = HistoryLimit(last=history)
    if history is not None and not isinstance(history, HistoryLimit):
        raise InvalidRequestError(f"the history of {name!r} must be a number of messages or a Keep, not {history!r}")
    if history is not None and history.summary is not None:
        required_arguments(name, "summary", history.summary, ["messages", "state"])
    return history
