"""Entries of the `handles` channel for all messages in the state: those that the reader's model has not encoded are."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, ToolMessage

from choreo_agents.chat import message_turn, thoughts_of, tool_calls_of, tools_called
from choreo_agents.engine import Prefill
from choreo_agents.errors import ForeignHandleError
from choreo_agents.graph.answers import encoding_of
from choreo_agents.graph.signer import (
    ProvenState,
    are_siblings,
    digest_of,
    entry_of,
    handle_of,
    is_confidential,
    is_edited,
    opening_of,
    persona_of,
    unproven_of,
    writer_of,
)
from choreo_agents.graph.state import (
    SENT_AT,
    HandleEntry,
    channel_in,
    handle_for,
    is_input,
    is_of_agent,
    model_of,
    with_edited_text,
    with_handle,
)
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.graph.view.placed_view import TurnMerger
from choreo_agents.graph.view.reader_rules import CallReader, ReaderRules
from choreo_agents.graph.view.view import SeenEntry, calls_of
from choreo_agents.graph.visibility import EVERYONE, START_SOURCE, source_of_author
from choreo_agents.kv.handle import MessageHandle

UNKNOWN = "its inputs are not recorded"


class EncodedEntries:
    """The entries of the messages in a graph's state, as one call reads them. Those that its model has not encoded are
    encoded behind the public root, once for all readers. Lazy: it costs nothing until a request attends to it.

    Args:
        reader: The reader of the call.
        proven: The messages and entries that it may trust.
        state: The state as the agent gets it.
    """

    def __init__(self, reader: CallReader, proven: ProvenState, state: Any) -> None:
        self.reader, self.messages = reader, proven.messages
        self.bound = BoundEngine(reader.engines[0], reader.place.node)
        self.turns = TurnMerger(self.bound)
        self.calls, self.called = calls_of(self.messages), tools_called(self.messages)
        self._earliest = max(proven.superstep, int(channel_in(state, SENT_AT) or 0))
        self.by_id = {str(message.id): message for message in self.messages}
        """The messages in the graph's state; a branch may be sent an entry without its message."""
        self.all = [self._as_read(entry) for entry in without_removed(proven.entries, self.messages, state)]
        """All entries, with those that this call has made."""
        self.made: list[HandleEntry] = []
        """Entries that this call has made, for messages that no node had encoded."""
        self.lost: dict[str, tuple[HandleEntry, str]] = {}
        """The former entry of each message that was encoded again, and why its encoding was of no use, by message
        id."""

    def _as_read(self, entry: HandleEntry) -> HandleEntry:
        """Return an entry as the reader sees it: in a stock graph, messages of a function that the reader does not
        declare are input."""
        source = source_of_author(entry["author"], self.reader.place.author)
        declared = not _counts_as_input(source, self.reader.rules)
        is_open = declared or "persona" in entry or "tool_node" in entry or entry["confidential"]
        return entry if is_open else HandleEntry(**{**entry, "author": START_SOURCE})

    @property
    def superstep(self) -> int:
        """The superstep of the next message."""
        return max(self._earliest, 1 + max((entry["superstep"] for entry in self.all), default=-1))

    async def encode_new(self) -> None:
        """Make entries for messages that no node has encoded in their current form."""
        by_id, bound = {entry["message_id"]: entry for entry in self.all}, self.bound
        rules, place = self.reader.rules, self.reader.place
        # Some messages are input to other readers, but this one knows their authors: encode them under these.
        inputs = [m for m in self.messages if is_encoded(m, by_id) and is_input(by_id[str(m.id)])]
        news = {str(m.id) for m in inputs if _writer(m, None, rules, place.author) != START_SOURCE}
        before = {name: entry for name, entry in by_id.items() if name not in news}
        lost = lost_ids(bound, before)
        new = [m for m in self.messages if not is_encoded(m, before) or str(m.id) in lost]
        self.lost |= {str(m.id): (before[str(m.id)], UNKNOWN) for m in new if is_encoded(m, before)}
        calls: list[Prefill] = []
        records: list[tuple[BaseMessage, str, bool, MessageHandle | str | None]] = []
        callers = callers_of(self.messages)
        for m in new:
            old_entry, caller = before.get(str(m.id)), callers.get(str(m.id))
            author = writer_of(caller) if caller else _writer(m, old_entry, rules, place.author)
            mark = old_entry["confidential"] if old_entry else is_confidential(caller or m)
            answer = None if author == START_SOURCE else encoding_of(m, self.reader.engines)
            records.append((m, author, mark, answer))
            if not isinstance(answer, MessageHandle):
                role, source = "tool" if isinstance(m, ToolMessage) else None, bound.if_alive(handle_of(m))
                options: Any = {"author": author, "role": role, "confidential": mark, "source": source}
                calls.append(await self._behind_root(m, recomputed=is_encoded(m, before), **options))
        encoded = iter(await bound.prefill_shared(calls))
        messages = [
            (m, author, mark, answer if isinstance(answer, MessageHandle) else next(encoded))
            for m, author, mark, answer in records
        ]
        entries = self._entries_of(messages, before, callers)
        for entry, (*_, answer) in zip(entries, records, strict=True):
            if entry["message_id"] in news:
                entry["superstep"] = by_id[entry["message_id"]]["superstep"]
            if isinstance(answer, MessageHandle):
                entry["answered"] = True
            elif isinstance(answer, str):
                self.lost[entry["message_id"]] = entry, answer
        self.made += entries
        self.all = list({entry["message_id"]: entry for entry in [*self.all, *entries]}.values())

    async def encode_foreign(self, items: Sequence[SeenEntry]) -> list[SeenEntry]:
        """Return the messages of the view, each with an encoding of the reader's model, and encode also those of the
        contexts in which text of the view is encoded.

        Raises:
            ForeignHandleError: A message is not in the graph's state; or, with `strict`, its encoding was to be read.
        """
        model = self.bound.model
        for entry, rule in items if self.reader.rules.strict else ():
            if is_of_agent(entry) and rule.mode.shares_kv and handle_for(entry, model) is None:
                raise self._refused(entry, "set its visibility to 'reencoded', or compile without strict=True")
        contexts = {self.reader.path_of(name) for _, rule in items for name in rule.contexts}
        named = [entry for path in contexts for entry in self.confidential_of(path)]
        read = [*(entry for entry, _ in items), *named]
        foreign = {entry["message_id"]: entry for entry in read if handle_for(entry, model) is None}
        calls: list[Prefill] = []
        for name, entry in foreign.items():
            if name not in self.by_id:
                raise self._refused(entry, "its text is not in the graph's state: send the message itself, too")
            source = MessageHandle.model_validate(entry["handle"]) if is_of_agent(entry) else None
            options: Any = {"author": entry["author"], "confidential": entry["confidential"], "source": source}
            calls.append(await self._behind_root(self.by_id[name], **options))
        handles = await self.bound.prefill_shared(calls)
        pairs = zip(foreign.items(), handles, strict=True)
        encoded = {name: with_handle(entry, handle) for (name, entry), handle in pairs}
        served = {engine.model.adapter.fingerprint for engine in self.reader.engines}
        for name, entry in encoded.items():
            if is_of_agent(entry) and model_of(entry["handle"]) not in served:
                self.lost[name] = entry, "it was made by another model, which is not served here"
        self.made = [*(entry for entry in self.made if entry["message_id"] not in encoded), *encoded.values()]
        self.all = [encoded.get(entry["message_id"], entry) for entry in self.all]
        return [item._replace(entry=encoded.get(item.entry["message_id"], item.entry)) for item in items]

    def confidential_of(self, path: str) -> list[HandleEntry]:
        """Return a node's confidential messages by superstep."""
        confidential = [entry for entry in self.all if entry["author"] == path and entry["confidential"]]
        return sorted(confidential, key=lambda entry: entry["superstep"])

    async def _behind_root(self, message: BaseMessage, **options: Any) -> Prefill:
        """Return the prefill of a message's text behind the public root."""
        text, kind = message_turn(message, self.turns.chat, called=self.called, opening=opening_of(message))
        return Prefill(text, await self.turns.behind_root(kind), **options)

    def _refused(self, entry: HandleEntry, advice: str) -> ForeignHandleError:
        handle = MessageHandle.model_validate(entry["handle"])
        return ForeignHandleError(
            f"the message of {entry['author']!r} is handle {handle.id!r} of model {handle.base_model!r}, but "
            f"{self.reader.place.author!r} runs on {self.bound.model!r}: {advice}"
        )

    def _entries_of(
        self,
        encoded: Sequence[tuple[BaseMessage, str, bool, MessageHandle]],
        before: Mapping[str, HandleEntry],
        callers: Mapping[str, BaseMessage],
    ) -> list[HandleEntry]:
        """Return the entries of newly encoded messages.

        Args:
            encoded: Messages, each with its author, whether it is confidential, and its handle.
            before: Their earlier entries, by message id.
            callers: For tool results: the messages that called the tool, by the results' ids.
        """
        entries: list[HandleEntry] = []
        superstep, task_path = self.superstep, [task.branch for task in self.reader.place.around]
        for index, (message, author, private, handle) in enumerate(encoded):
            # Ids are random: without the task path, the order of branches would differ from run to run.
            place: Any = {"branch": index, "task_path": task_path}
            entry = entry_of(handle, author, superstep, message, confidential=private, **place)
            persona, earlier = persona_of(message), before.get(str(message.id))
            claimed = unproven_of(message)
            if persona is not None and claimed is None:
                # Its author's entry, where it reaches this state, takes precedence.
                entry["borrowed"] = True
            if persona is not None and author != START_SOURCE:
                entry |= {"persona": persona, **({"thoughts": None} if thoughts_of(message) else {})}
            if (caller := callers.get(str(message.id))) is not None:
                entry["tool_node"] = writer_of(message)
                entry |= {} if (owner := persona_of(caller)) is None else {"persona": owner}
            if is_edited(message):
                entry["edited"] = True
            if claimed is not None:
                entry["unverified_author"] = dict(claimed)
            if earlier is not None and earlier["author"] == author:
                same = earlier.get("digest") == entry["digest"]
                entry = with_handle(earlier, handle) if same else with_edited_text(earlier, handle, entry["digest"])
                entry.pop("answered", None)
                if not same and author != START_SOURCE:
                    entry["edited"] = True
                    if "thoughts" in entry:
                        entry["thoughts"] = None
            elif entries and author != entries[-1]["author"] and not are_siblings(encoded[index - 1][0], message):
                superstep = entry["superstep"] = superstep + 1  # keeps the order of different authors' messages
            entries.append(entry)
        return entries


def _writer(message: BaseMessage, entry: HandleEntry | None, rules: ReaderRules, reader: str) -> str:
    """Return a message's author: that of its entry, unless a function has rewritten the message. Without an entry, an
    unknown agent's open message is input."""
    author, chart = writer_of(message), rules.guard.chart
    if entry is not None:
        is_same = entry.get("digest") in (None, digest_of(message))
        return entry["author"] if is_same or author == START_SOURCE else author
    source = source_of_author(author, reader)
    if source is None and rules.around:
        return author
    if persona_of(message) is None and _counts_as_input(source, rules):
        return START_SOURCE
    foreign = bool(chart.nodes) and not chart.inside(source or "")
    return START_SOURCE if foreign and persona_of(message) and not is_confidential(message) else author


def _counts_as_input(source: str | None, rules: ReaderRules) -> bool:
    """Return whether messages of a function are input: in a stock graph they are, unless the function is declared."""
    is_known = rules.node or (source is None and rules.around)
    return not is_known and not {source, EVERYONE} & rules.sources.keys()


def is_encoded(message: BaseMessage, entries: Mapping[str, HandleEntry]) -> bool:
    """Return whether the message has an entry with its present text."""
    entry = entries.get(str(message.id))
    return entry is not None and entry.get("digest") in (None, digest_of(message))


def lost_ids(bound: BoundEngine, entries: Mapping[str, HandleEntry]) -> set[str]:
    """Return the ids of messages that the engine's model encoded, and that the engine no longer knows."""
    model = bound.model
    handles = {name: handle for name, entry in entries.items() if (handle := handle_for(entry, model)) is not None}
    located = zip(handles.items(), bound.engine.kv.tiers(list(handles.values())), strict=True)
    return {name for (name, handle), tier in located if tier is None and not bound.knows(handle)}


def without_removed(entries: Sequence[HandleEntry], messages: Sequence[BaseMessage], state: Any) -> list[HandleEntry]:
    """Return the entries whose message was not removed; all, if a `Send` left the `messages` channel out.

    LangGraph shows input to a route from START under other ids than the channel assigns. Entries that branches made of
    it are matched by digest, where the order of messages allows that.
    """
    if isinstance(state, Mapping) and "messages" not in state:
        return list(entries)
    by_id = {entry["message_id"]: entry for entry in entries}
    present = {message.id for message in messages}
    unnamed: dict[str, deque[HandleEntry]] = {}
    for candidate in entries:
        if candidate["author"] == START_SOURCE and candidate["message_id"] not in present:
            unnamed.setdefault(candidate.get("digest", ""), deque()).append(candidate)
    stand_ins: dict[str, str] = {}
    latest = -1
    for message in messages:
        entry = by_id.get(str(message.id))
        is_input = writer_of(message) == START_SOURCE and unproven_of(message) is None
        alike = unnamed.get(digest_of(message)) if entry is None and is_input else None
        if alike and alike[0]["superstep"] >= latest:
            entry = alike.popleft()
        if entry is not None and entry["superstep"] >= latest:
            stand_ins.setdefault(entry["message_id"], str(message.id))
            latest = entry["superstep"]
    present |= stand_ins.keys()
    named = [(e, stand_ins.get(e["message_id"], e["message_id"])) for e in entries if e["message_id"] in present]
    return [e if e["message_id"] == name else HandleEntry(**{**e, "message_id": name}) for e, name in named]


def callers_of(messages: Sequence[BaseMessage]) -> dict[str, BaseMessage]:
    """Return the messages that called tools, by the ids of the results, where nodes of the graph wrote both.

    A result that comes as input belongs to input, whatever call it names; so does the result of a call in input.

    Args:
        messages: Messages of the state whose author is verified.
    """
    written = [message for message in messages if writer_of(message) != START_SOURCE]
    # Reversed, so that the first message with a call id counts: later ones copied it.
    calls = {call.id: message for message in reversed(written) for call in reversed(tool_calls_of(message))}
    results = [message for message in written if isinstance(message, ToolMessage) and message.tool_call_id in calls]
    return {str(result.id): calls[result.tool_call_id] for result in results}
