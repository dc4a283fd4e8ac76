"""Selects the messages that one reader sees, in which order, and how many: plain data, without an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from langchain_core.messages import BaseMessage, ToolMessage

from choreo_agents.arguments import refuses_unknown
from choreo_agents.chat import tool_calls_of
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.graph.prompts import required_arguments
from choreo_agents.graph.state import HandleEntry, is_input, is_own
from choreo_agents.graph.view.reader_rules import CallReader
from choreo_agents.graph.visibility import EVERYONE, REENCODED, START_SOURCE, VisibilityRule, mode_of, source_in

Summary = Callable[..., str | Awaitable[str | None] | None]
"""Makes a text from the messages outside an agent's history, which the agent gets in their place; None: nothing."""
_OWN = "|own"
"""The source of messages by the reader's own persona; no node can have this name."""


class SeenEntry(NamedTuple):
    """A message of a view and the rule by which its reader sees it."""

    entry: HandleEntry
    rule: VisibilityRule


def seen(
    reader: CallReader, entries: Sequence[HandleEntry], calls: Mapping[str, str]
) -> tuple[list[SeenEntry], set[str]]:
    """Return a reader's view, and the authors of whose answers it reads the text only, since these may have attended to
    what is kept from it.

    Args:
        reader: The reader of a call.
        entries: All messages.
        calls: The call's message id by that of its result.
    """
    rules, persona = reader.rules, reader.persona
    options: Any = {"persona": persona, "undeclared": rules.undeclared, "unnamed": rules.unnamed, "calls": calls}
    items = visible(entries, reader.place.author, rules.sources, **options)
    names = {item.entry["message_id"] for item in items}
    # True if any graph's state has a confidential message that the reader does not see.
    is_kept = any(entry["confidential"] and entry["message_id"] not in names for entry in entries)
    result: list[SeenEntry] = []
    text_only: set[str] = set()
    for entry, rule in items:
        answered = bool(entry.get("answered")) and rule.mode.shares_kv
        in_words = answered and (is_kept or is_input(entry) or reader.gets_words_of(entry))
        if in_words and not is_input(entry):
            text_only.add(entry["author"])
        result.append(SeenEntry(entry, replace(rule, mode=REENCODED) if in_words else rule))
    return result, text_only


def visible(
    entries: Sequence[HandleEntry],
    reader: str,
    rules: Mapping[str, VisibilityRule],
    persona: str | None = None,
    undeclared: Collection[str] | None = None,
    unnamed: Collection[str] = (),
    calls: Mapping[str, str] = MappingProxyType({}),
) -> list[SeenEntry]:
    """Return a reader's view: by superstep; within one, input first, then its own messages, then sources in declared
    order.

    Messages of its own persona are always there, shared; those of private sources and of sources without a rule never
    are. The order of `entries` does not matter.

    Args:
        entries: All messages.
        reader: The node that reads, behind its subgraphs.
        rules: Its rules by source.
        persona: The persona of the node; by default its own name.
        undeclared: If it reads everyone, the sources that it does not name: without their confidential messages.
            Messages of one superstep, its own included, are then ordered by name, as LangGraph applies updates.
        unnamed: Sources outside of its graph whose confidential messages it does not see.
        calls: The call's message id by that of its result: history counts both at the superstep of the call, and keeps
            both or neither.

    Raises:
        VisibilityError: A `send` hands on more than the reader may see.
    """
    rank: dict[str | None, int] = {START_SOURCE: -1, _OWN: 0}
    if undeclared is None:
        rank = {**{source: i for i, source in enumerate(rules, start=1)}, **rank}
    by_source: dict[str | None, list[HandleEntry]] = {}
    for entry in entries:
        claimed = entry.get("unverified_author")
        if claimed is not None and (START_SOURCE not in rules or not rules[START_SOURCE].mode.shows):
            continue  # an author without a proof is input
        if (tool_rule := _rule_of(entry.get("tool_node"), reader, rules)) is not None and not tool_rule.mode.shows:
            continue  # a tool's result is hidden from those who must not read the tool's node
        own = is_own(entry, reader, persona or reader)
        source = _OWN if own else source_in(rules, claimed["author"] if claimed else entry["author"], reader)
        by_source.setdefault(source, []).append(entry)
    ranked: list[tuple[int, SeenEntry]] = []
    cut: set[str] = set()
    for source, messages in by_source.items():
        others = None if source is None else rules.get(source, rules.get(EVERYONE))
        rule = VisibilityRule() if source == _OWN else others
        named = undeclared is None or source == _OWN or (source in rules and source not in undeclared)
        named = named and source not in unnamed
        shows = rule is not None and rule.mode.shows
        readable = [entry for entry in messages if shows and (named or not entry["confidential"])]
        shown = {id(entry) for entry in _recent(readable, rule, calls)}
        cut |= {_unit_of(entry, calls) for entry in readable if id(entry) not in shown}
        for entry in messages:
            if id(entry) in shown or entry.get("select"):
                narrowed = _narrowed(entry, rule if id(entry) in shown else None, source, reader)
                if entry.get("unverified_author") and narrowed.mode.shares_kv:
                    narrowed = rules[START_SOURCE]  # an author without a proof gets no more than input does
                tool_rule = _rule_of(entry.get("tool_node"), reader, rules)
                if tool_rule is not None and narrowed.mode.shares_kv:
                    narrowed = replace(narrowed, mode=tool_rule.mode)
                ranked.append((rank.get(source, 0), SeenEntry(entry, narrowed)))
    ranked.sort(key=_sort_key)
    return [item for _, item in ranked if _unit_of(item.entry, calls) not in cut]


def _rule_of(node: str | None, reader: str, rules: Mapping[str, VisibilityRule]) -> VisibilityRule | None:
    """Return the rule for the node that wrote a tool's result; None: nothing is declared."""
    return None if node is None else rules.get(source_in(rules, node, reader) or "")


def _narrowed(entry: HandleEntry, rule: VisibilityRule | None, source: str | None, reader: str) -> VisibilityRule:
    """Return the rule for an entry that a `send` may have selected: never more than the source's rule."""
    selected = entry.get("select")
    mode = None if rule is None else rule.mode.narrowed(mode_of(selected)) if selected else rule.mode
    if rule is None or mode is None:
        node = reader.rsplit("|", maxsplit=1)[-1]
        allowed = "nothing" if rule is None else rule.words()
        raise VisibilityError(
            f"a send passes a message of {source or entry['author']!r} to {node!r} as {selected!r}, but it may see "
            f"{allowed} of it: set the visibility of {source or entry['author']!r} to {node!r} to {selected!r}, or "
            "send less"
        )
    return replace(rule, mode=mode)


def _recent(entries: list[HandleEntry], rule: VisibilityRule | None, calls: Mapping[str, str]) -> list[HandleEntry]:
    """Return the entries of a source's last supersteps, as many as the rule's history keeps.

    An entry that a `send` selected has the number of later supersteps in `behind`, since the branch was not sent them.
    """
    if rule is None or rule.history == "all":
        return entries
    keep = 1 if rule.history == "last" else rule.history
    at = said_at(entries, calls)
    latest = sorted(set(at.values()))[-keep:]
    return [entry for entry in entries if at[entry["message_id"]] in latest and entry.get("behind", 0) < keep]


def said_at(entries: Sequence[HandleEntry], calls: Mapping[str, str]) -> dict[str, int]:
    """Return the superstep at which each message counts: a tool's result at that of its call, if that is there."""
    supersteps = {entry["message_id"]: entry["superstep"] for entry in entries}
    return {name: supersteps.get(calls.get(name, name), at) for name, at in supersteps.items()}


def calls_of(messages: Sequence[BaseMessage]) -> dict[str, str]:
    """Return the ids of messages that called tools, by the ids of the results, whoever wrote either.

    Args:
        messages: Messages in order: call ids may repeat, and the latest caller counts.
    """
    callers: dict[str, str] = {}
    by_result: dict[str, str] = {}
    for message in messages:
        callers |= {call.id: str(message.id) for call in tool_calls_of(message) if call.id}
        if isinstance(message, ToolMessage) and message.tool_call_id in callers:
            by_result[str(message.id)] = callers[message.tool_call_id]
    return by_result


def _unit_of(entry: HandleEntry, calls: Mapping[str, str]) -> str:
    """Return the id of what is seen as a whole or not at all: a call with its results, or any other message."""
    return calls.get(entry["message_id"], entry["message_id"])


def call_of(entry: HandleEntry) -> tuple[str, list[int], int, int]:
    """Return a sort key for the calls of one superstep: branches come in the order in which they were sent."""
    return entry["author"], entry.get("task_path", []), entry["branch"], entry.get("call", 0)


def _sort_key(item: tuple[int, SeenEntry]) -> tuple[int, int, tuple[str, list[int], int, int], str]:
    """Return the sort key of a message in a view; the message id only breaks ties."""
    rank, (entry, _) = item
    return entry["superstep"], rank, call_of(entry), entry["message_id"]


def siblings(view: Sequence[SeenEntry], *, parallel: bool) -> Iterator[list[list[SeenEntry]]]:
    """Yield groups of siblings that start at one position; each sibling is a list of consecutive messages."""
    if not parallel:
        for item in view:
            yield [[item]]
        return

    def moment(item: SeenEntry) -> tuple[int, bool]:
        return item.entry["superstep"], is_input(item.entry)

    for (_, written), group in groupby(view, key=moment):
        if written:
            # Input is one conversation: its messages follow each other.
            yield [list(group)]
        else:
            yield [list(branch) for _, branch in groupby(group, key=lambda item: call_of(item.entry))]


# Limits on the length of a view


@refuses_unknown()
@dataclass(frozen=True)
class HistoryLimit:
    """Limit on an agent's view to the latest messages, its own included; instructions are always kept.

    A call and its results are kept together, or not at all.

    Kept messages have attended to those before them, and may repeat them: a limit bounds what a call costs, not what it
    can know.
    """

    last: int | None = None
    """Number of messages; all results of the latest call are kept, even if they are more. 0: none, its own included:
    the prompt must say everything."""
    tokens: int | None = None
    """Number of positions that the messages may take."""
    summary: Summary | None = None
    """Function that makes a text in place of the other messages, for each call anew; a private context of the agent."""

    def __post_init__(self) -> None:
        for name, least in (("last", 0), ("tokens", 1)):
            bound = getattr(self, name)
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < least):
                raise InvalidRequestError(f"{name} of a history must be {least} or more, not {bound!r}")
        if self.last is None and self.tokens is None:
            raise InvalidRequestError("a history needs a limit: HistoryLimit(last=...) or HistoryLimit(tokens=...)")

    def split(
        self,
        view: Sequence[SeenEntry],
        length: Callable[[SeenEntry], int],
        instructs: Callable[[SeenEntry], bool],
        calls: Mapping[str, str],
    ) -> tuple[list[SeenEntry], list[SeenEntry]]:
        """Split a view into the messages that are kept and those that are not, both in its order.

        Args:
            view: The messages.
            length: Returns the length of a message in positions.
            instructs: Returns whether a message is an instruction.
            calls: The call's message id by that of its result: both are kept, or neither.
        """
        together: dict[str, list[SeenEntry]] = {}
        for item in reversed(view):
            if not instructs(item):
                together.setdefault(_unit_of(item.entry, calls), []).append(item)
        chosen = {id(item.entry) for item in view if instructs(item)}
        count = length_sum = 0
        for unit in together.values():
            # The latest unit is always kept: if it is a result, with its call and the call's other results.
            most = self.last if count or not self.last else max(self.last, len(unit))
            count += len(unit)
            length_sum += 0 if self.tokens is None else sum(map(length, unit))
            if (most is not None and count > most) or (self.tokens is not None and length_sum > self.tokens):
                break
            chosen |= {id(item.entry) for item in unit}
        return [e for e in view if id(e.entry) in chosen], [e for e in view if id(e.entry) not in chosen]


def required_history(name: str, history: object) -> HistoryLimit | None:
    """Return a history argument as a `HistoryLimit`; raise `InvalidRequestError` if it is none."""
    if isinstance(history, int) and not isinstance(history, bool):
        history = HistoryLimit(last=history)
    if history is not None and not isinstance(history, HistoryLimit):
        raise InvalidRequestError(
            f"the history of {name!r} must be a number of messages or a HistoryLimit, not {history!r}"
        )
    if history is not None and history.summary is not None:
        required_arguments(name, "summary", history.summary, ["messages", "state"])
    return history
