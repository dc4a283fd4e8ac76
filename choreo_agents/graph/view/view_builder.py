"""Builds one reader's view: encodes new messages, places visible ones, and encodes text again where the rules say
so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

from langchain_core.messages import BaseMessage, ToolMessage

from choreo_agents.chat import Described, message_turn, own_turns, tools_called
from choreo_agents.engine import Engine, Prefill
from choreo_agents.engine.transfer import Leases
from choreo_agents.errors import ContextLengthError, ForeignHandleError, HandleError
from choreo_agents.graph.answers import NO_REFERENCE, UNPROVEN, encoding_of
from choreo_agents.graph.signer import digest_of, handle_of, is_confidential, opening_of, persona_of, writer_of
from choreo_agents.graph.state import HandleEntry, handle_for, is_of_agent, length_for, with_handle
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.graph.view.merged_branches import MergedBranches
from choreo_agents.graph.view.placed_view import PlacedView, TurnMerger
from choreo_agents.graph.view.reader_rules import CallReader, ReaderRules
from choreo_agents.graph.view.rendered_view import RenderedView
from choreo_agents.graph.view.view import SeenEntry, Summary, call_of, visible
from choreo_agents.graph.view.view_encoder import ViewEncoder, confidential_of, context_path
from choreo_agents.graph.visibility import EVERYONE, REENCODED, START_SOURCE, source_of_author
from choreo_agents.graph.words.entries import callers_of, calls_of, entries_of, if_alive, is_encoded, is_input, lost_ids
from choreo_agents.graph.words.thoughts import keeps_thoughts, without_thoughts
from choreo_agents.kv.handle import MessageHandle, base_model

UNKNOWN = "its inputs are not recorded"


class ViewBuilder:
    """Builder of the view of one call of one node. Lives as long as the call.

    Args:
        engine: The reader's engine.
        reader: The reader of the call.
        messages: The messages in the graph's state.
        entries: Their entries.
        earliest: The first superstep that the reader's message may have.
    """

    def __init__(
        self,
        engine: Engine,
        reader: CallReader,
        messages: Sequence[BaseMessage],
        entries: list[HandleEntry],
        earliest: int,
    ) -> None:
        self.bound = BoundEngine(engine, reader.place.node)
        self._engine, self._engines = engine, (engine, *reader.others)
        self._reader, self._rules, self._place = reader, reader.rules, reader.place
        self._messages, self._calls = messages, calls_of(messages)
        self.entries = [self._as_read(entry) for entry in entries]
        """All entries; once there is a view, with those that this call has made."""
        self.inputs: list[HandleEntry] = []
        """Entries that this call has made for messages that no node had encoded."""
        self.lost: dict[str, tuple[HandleEntry, str]] = {}
        """The former entry of each message that was encoded again, and why its encoding was of no use, by message
        id."""
        self.attends_to_answers = False
        """True if the view has the encoding of a chat model's answer, which may have attended to anything its function
        reads."""
        self._text_only: set[str] = set()
        """Authors whose answers are read as text, since they may have attended to what is kept from the reader."""
        self.words_of: dict[str, str] = {}
        """Authors of whom only text is read where KV should be, and the reason."""
        self._modules: Leases | None = None
        self._branches = MergedBranches(self.bound, reader)
        self._earliest = earliest
        self.superstep = self._next_superstep(entries)
        self.rendered = RenderedView(reader)
        """The view as chat messages."""
        self.summary: str | None = None
        """Text in place of the messages outside the reader's history."""
        self._turns = TurnMerger(self.bound)
        self.showing = ViewEncoder(self.bound, reader, messages, self._turns, self._branches.stands_for)

    async def view(
        self,
        system: str | None,
        tools: Described = (),
        *,
        summary: Callable[[Summary, Sequence[BaseMessage]], Awaitable[str | None]],
    ) -> PlacedView:
        """Encode the messages that have no encoding yet, and assemble all that the reader may see.

        Args:
            system: The agent's own system prompt.
            tools: The tools that it may call.
            summary: Calls a function that makes the text in place of messages outside the history.
        """
        await self._turns.begin(self._rules.shared_system)
        view, imported = await self._start(), self._reader.agent.imported
        self.rendered.begin(self._rules.shared_system, system, tools, () if imported is None else imported.parts)
        later = bool(self._rules.shared_system) or imported is not None
        own = own_turns(system, tools, self._engine.chat, later=later)
        if imported is None:
            await self._turns.append_turns(view, own, self._reader.system, self._reader.agent.adapter)
        await self._prefill_turns()
        self.entries = list({entry["message_id"]: entry for entry in [*self.entries, *self.inputs]}.values())
        self.superstep = self._next_superstep(self.entries)
        if imported is not None:
            self._modules = await imported.lease()
            modules = [self.bound.grant(handle) for handle in self._modules.handles]
            self.showing.lasting |= {handle.id for handle in modules}
            await imported.place(view, modules, self._reader.system, self.bound, self._reader.agent.adapter)
            await self._turns.append_turns(view, own, self._reader.system, self._reader.agent.adapter)
        shown, dropped = self._split_history(await self._encode_visible())
        self.showing.begin(self.entries)
        self._note_words_of(shown)
        instructed = bool(own) or bool(self._rules.shared_system) or imported is not None
        if not instructed and not (shown and self.showing.instructs(shown[0].entry)):
            for handle in await self._turns.default_instructions():
                view.add(handle)
        limit = self._reader.agent.history
        if dropped and limit is not None and limit.summary is not None:
            self.summary = await summary(limit.summary, self._dropped_messages(dropped))
            if self.summary is not None:
                await self.showing.append_prompt(view, self.summary)
            self.rendered.ask(self.summary, confidential=any(entry["confidential"] for entry, _ in dropped))
        self.showing.copies += await self._branches.prepare(shown)
        self._branches.record(view)
        for group in _groups(shown, parallel=self.is_parallel):
            await self._append_group(view, group)
            items = list(chain(*group))
            self._branches.record(view, items, ends=any(is_input(e) or self._reader.has_said(e) for e, _ in items))
            for entry, _ in items:
                if (words := self.showing.as_read(entry)) is not None:
                    self.rendered.add_message(entry, self._as_seen(entry, words))
        self.showing.copies += await self._branches.append_boundaries(view)
        return view

    def _dropped_messages(self, dropped: Sequence[SeenEntry]) -> list[BaseMessage]:
        """Return messages outside the reader's history, with no more text than its view would have had."""
        for entry, _ in dropped:
            self.showing.allows(entry, words_only=True)
        messages = [(entry, self.showing.in_mode(entry, rule.mode)) for entry, rule in dropped]
        return [self._as_seen(entry, words) for entry, words in messages if words is not None]

    def _as_seen(self, entry: HandleEntry, words: BaseMessage) -> BaseMessage:
        """Return a message without its thoughts, unless it is the reader's own and the chat template shows these."""
        if (shorter := self._branches.summaries.get(self.bound.handle(entry).id)) is not None:
            return words.model_copy(update={"content": shorter})
        own = self._reader.has_said(entry) and keeps_thoughts(self._engine.chat, entry)
        return words if own else without_thoughts(words)

    async def _encode_visible(self) -> list[SeenEntry]:
        """Return the visible messages, each with an encoding of the reader's model."""
        items = self._visible_items()
        contexts = {context_path(name, self._place) for _, rule in items for name in rule.contexts}
        named = [entry for path in contexts for entry in confidential_of(path, self.entries)]
        encoded = {entry["message_id"]: entry for entry in await self._encode_foreign(items, named)}
        if not encoded:
            return items
        self.lost |= _unserved(encoded, self._engines)
        self.inputs = [*(entry for entry in self.inputs if entry["message_id"] not in encoded), *encoded.values()]
        self.entries = [encoded.get(entry["message_id"], entry) for entry in self.entries]
        return self._visible_items()

    async def _encode_foreign(self, items: Sequence[SeenEntry], named: Sequence[HandleEntry]) -> list[HandleEntry]:
        """Encode the messages that lack an encoding of the reader's model: behind the public root, once for all its
        readers. Lazy: it costs nothing until a request attends to it.

        Args:
            items: The messages of the view.
            named: Messages of the contexts in which text of the view is encoded; only their own text is needed.

        Raises:
            ForeignHandleError: A message is not in the graph's state; or, with `strict`, its encoding was to be read.
        """
        foreign = [item for item in items if handle_for(item.entry, self.bound.model) is None]
        for entry, rule in foreign if self._rules.strict else ():
            if is_of_agent(entry) and rule.mode.shares_kv:
                raise self._refused(entry, "set its visibility to 'reencoded', or compile without strict=True")
        missing = [*(entry for entry, _ in foreign), *(e for e in named if handle_for(e, self.bound.model) is None)]
        different = list({entry["message_id"]: entry for entry in missing}.values())
        calls: list[Prefill] = []
        for entry in different:
            if (message := self.showing.in_state(entry)) is None:
                raise self._refused(entry, "its text is not in the graph's state: send the message itself, too")
            text, kind = message_turn(message, self._engine.chat, opening=opening_of(message))
            source = MessageHandle.model_validate(entry["handle"]) if is_of_agent(entry) else None
            extra: dict[str, Any] = {"author": entry["author"], "confidential": entry["confidential"], "source": source}
            calls.append(Prefill(text, await self._turns.behind_root(kind), **extra))
        handles = await self.bound.prefill_shared(calls)
        return [with_handle(entry, handle) for entry, handle in zip(different, handles, strict=True)]

    def _refused(self, entry: HandleEntry, advice: str) -> ForeignHandleError:
        handle = MessageHandle.model_validate(entry["handle"])
        return ForeignHandleError(
            f"the message of {entry['author']!r} is handle {handle.id!r} of model {handle.base_model!r}, but "
            f"{self._place.author!r} runs on {self.bound.model!r}: {advice}"
        )

    @property
    def is_parallel(self) -> bool:
        """True if sibling messages start at one position."""
        return self._rules.positions == "parallel" and self._engine.method == "choreo"

    def outgrown(self, error: ContextLengthError) -> ContextLengthError:
        """Return the error with the source whose messages take most of the view, and advice to make them fewer."""
        tokens: Counter[str] = Counter()
        author = self._place.author
        reader = author.rsplit("|", maxsplit=1)[-1]
        for entry, _ in self._visible_items():
            own = self._reader.has_said(entry)
            source = reader if own else source_of_author(entry["author"], author) or entry["author"]
            tokens[source] += length_for(entry, self.bound.model)
        if not tokens:
            return error
        [(source, count)] = tokens.most_common(1)
        owner = "its own" if source == reader else f"{source!r}'s"
        advice = f"show {source!r} to {reader!r} with history='last', or shorten the loop that both are in"
        if source == reader:
            advice = "limit them with Agent(history=...), or shorten the loop that it is in"
        elif source == START_SOURCE:
            owner, advice = "input", "send less"
        return ContextLengthError(f"{error}. In the view of {reader!r}, {count} tokens are {owner}: {advice}")

    def _split_history(self, shown: list[SeenEntry]) -> tuple[list[SeenEntry], list[SeenEntry]]:
        """Split the view into messages inside and outside the reader's history."""
        limit = self._reader.agent.history
        if limit is None:
            return shown, []
        return limit.split(shown, self.showing.length, lambda item: self.showing.instructs(item.entry), self._calls)

    def _visible_items(self) -> list[SeenEntry]:
        rules, reader, calls = self._rules, self._reader, self._calls
        options: Any = {"persona": reader.persona, "undeclared": rules.undeclared, "unnamed": rules.unnamed}
        items = visible(self.entries, self._place.author, rules.sources, calls=calls, **options)
        names = {item.entry["message_id"] for item in items}
        # True if any graph's state has a confidential message that the reader does not see.
        is_kept = any(entry["confidential"] and entry["message_id"] not in names for entry in self.entries)
        result = []
        for item in items:
            answered = bool(item.entry.get("answered")) and item.rule.mode.shares_kv
            in_words = answered and (is_kept or is_input(item.entry) or reader.gets_words_of(item.entry))
            if in_words and not is_input(item.entry):
                self._text_only.add(item.entry["author"])
            result.append(item._replace(rule=replace(item.rule, mode=REENCODED)) if in_words else item)
        return result

    def _note_words_of(self, shown: Sequence[SeenEntry]) -> None:
        """Record where text is read instead of KV: answers kept from the reader, and branches without an encoding to
        merge."""
        for entry, rule in shown:
            # It stays set when the answer is removed later: the new message has attended to it.
            self.attends_to_answers |= rule.mode.shares_kv and bool(entry.get("answered"))
            if entry["author"] in self._text_only:
                self.words_of[entry["author"]] = (
                    "it may have attended to everything that its function can read, and some of that is hidden from "
                    "the reader: make less private, or let an Agent write it"
                )
        for entry in () if self.words_of else self._branches.read_as_text(shown):
            message = self.showing.in_state(entry)
            if message is not None and not (is_input(entry) and (self._rules.node or message.type != "ai")):
                claimed = entry.get("unverified_author")
                why = UNPROVEN if claimed else encoding_of(message, self._engines)
                author = claimed["author"] if claimed else entry["author"]
                said_by = "its input" if author == START_SOURCE else author
                self.words_of[said_by] = why if isinstance(why, str) else NO_REFERENCE

    def _as_read(self, entry: HandleEntry) -> HandleEntry:
        """Return an entry as the reader sees it: in a stock graph, messages of a function that the reader does not
        declare are input."""
        declared = not _counts_as_input(source_of_author(entry["author"], self._place.author), self._rules)
        is_open = declared or "persona" in entry or "tool_node" in entry or entry["confidential"]
        return entry if is_open else HandleEntry(**{**entry, "author": START_SOURCE})

    def _next_superstep(self, entries: Sequence[HandleEntry]) -> int:
        return max(self._earliest, 1 + max((entry["superstep"] for entry in entries), default=-1))

    def release(self) -> None:
        """Release what was encoded for this call alone, and all but one lease of what is shared."""
        with suppress(HandleError):  # a scope may have ended meanwhile
            for handle in self.bound.shared:
                self._engine.release(handle, keep_last=True)
            for handle in self.showing.copies:
                self._engine.release(handle)
        if self._modules is not None:
            self._modules.release()

    async def _start(self) -> PlacedView:
        """Return the view before the agent's own instructions."""
        if self._reader.agent.imported is None:
            return self._turns.root.copy()
        # A schema brings the template's start of a conversation: an empty root would repeat it.
        view, public = PlacedView(), self._rules.shared_system
        for handle in () if public is None else await self._turns.whole_root(public):
            view.add(handle)
        return view

    async def _prefill_turns(self) -> None:
        """Make entries for messages that no node has encoded in their current form."""
        chat = self._engine.chat
        by_id = {entry["message_id"]: entry for entry in self.entries}
        # Some messages are input to other readers, but this one knows their authors: encode them under these.
        inputs = [m for m in self._messages if is_encoded(m, by_id) and is_input(by_id[str(m.id)])]
        news = {str(m.id) for m in inputs if _writer(m, self._rules, self._place.author) != START_SOURCE}
        before = {name: entry for name, entry in by_id.items() if name not in news}
        lost = lost_ids(self._engine, before)
        new = [m for m in self._messages if not is_encoded(m, before) or str(m.id) in lost]
        self.lost |= {str(m.id): (before[str(m.id)], UNKNOWN) for m in new if is_encoded(m, before)}
        calls: list[Prefill] = []
        records: list[tuple[BaseMessage, str, bool, MessageHandle | str | None]] = []
        callers, called = callers_of(self._messages), tools_called(self._messages)
        for m in new:
            old_entry, caller = before.get(str(m.id)), callers.get(str(m.id))
            author = writer_of(caller) if caller else _author(m, old_entry)
            author = author or _writer(m, self._rules, self._place.author)
            mark = old_entry["confidential"] if old_entry else is_confidential(caller or m)
            answer = None if author == START_SOURCE else encoding_of(m, self._engines)
            records.append((m, author, mark, answer))
            if not isinstance(answer, MessageHandle):
                text, kind = message_turn(m, chat, called=called, opening=opening_of(m))
                source = if_alive(self._engine, handle_of(m))
                role, parents = "tool" if isinstance(m, ToolMessage) else None, await self._turns.behind_root(kind)
                options: Any = {"author": author, "role": role, "confidential": mark, "source": source}
                calls.append(Prefill(text, parents, recomputed=is_encoded(m, before), **options))
        encoded = iter(await self.bound.prefill_shared(calls))
        messages = [
            (m, author, mark, answer if isinstance(answer, MessageHandle) else next(encoded))
            for m, author, mark, answer in records
        ]
        entries = entries_of(messages, before, self.superstep, callers, [task.branch for task in self._place.around])
        for entry, (*_, answer) in zip(entries, records, strict=True):
            if entry["message_id"] in news:
                entry["superstep"] = by_id[entry["message_id"]]["superstep"]
            if isinstance(answer, MessageHandle):
                entry["answered"] = True
            elif isinstance(answer, str):
                self.lost[entry["message_id"]] = entry, answer
        self.inputs += entries

    async def _append_group(self, view: PlacedView, group: Sequence[Sequence[SeenEntry]]) -> None:
        """Append a group of sibling messages: each starts at the view's end, or, if merged, where its branch left the
        view."""
        if len(group) > 1:
            # Each sibling brings its own separators, so that nothing depends on their order.
            await self._turns.close(view)
        before = view.copy()
        for items in group:
            so_far, first = before.copy(), self.bound.handle(items[0].entry)
            if self.is_parallel and first.id in self._branches.stands_for:
                # A branch that read a re-encoded copy of the input still stands behind the input.
                attended = {parent.id for parent in self._engine.inspect.ancestors(first)}
                inputs = {self.bound.handle(entry).id for entry in self.entries if is_input(entry)}
                descents = self._engine.inspect.descent([first], ())
                attended |= {source for parent in attended for source in descents[parent].sources if source in inputs}
                so_far.end = before.end_of(attended)
            shown = len(so_far.handles)
            for entry, rule in items:
                await self.showing.append(so_far, entry, rule)
            if len(group) > 1:
                await self._turns.close(so_far)
            view.extend(so_far, shown)


def _unserved(encoded: Mapping[str, HandleEntry], engines: Sequence[Engine]) -> dict[str, tuple[HandleEntry, str]]:
    """Return the entries whose model none of the engines serves, with the reason, by message id."""
    served = {engine.model.adapter.fingerprint for engine in engines}
    why = "it was made by another model, which is not served here"
    sampled = {name: entry for name, entry in encoded.items() if is_of_agent(entry)}
    return {name: (entry, why) for name, entry in sampled.items() if base_model(entry["handle"]["model"]) not in served}


def _groups(view: Sequence[SeenEntry], *, parallel: bool) -> Iterator[list[list[SeenEntry]]]:
    """Yield groups of siblings that start at one position; each sibling is a list of consecutive messages."""
    if not parallel:
        for item in view:
            yield [[item]]
        return
    for (_, written), group in groupby(view, key=lambda item: (item.entry["superstep"], is_input(item.entry))):
        if written:
            # Input is one conversation: its messages follow each other.
            yield [list(group)]
        else:
            yield [list(branch) for _, branch in groupby(group, key=lambda item: call_of(item.entry))]


def _author(message: BaseMessage, entry: HandleEntry | None) -> str | None:
    """Return the author of a message that has an entry: the entry's, unless a function has rewritten the message."""
    if entry is None:
        return None
    is_same = entry.get("digest") in (None, digest_of(message))
    writer = START_SOURCE if is_same else writer_of(message)
    return entry["author"] if writer == START_SOURCE else writer


def _writer(message: BaseMessage, rules: ReaderRules, reader: str) -> str:
    """Return the author of a message without an entry. An unknown agent's open message is input."""
    author, chart = writer_of(message), rules.guard.chart
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
