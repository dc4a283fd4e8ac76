"""Builds one reader's view: encodes new messages, places visible ones, and encodes text again where the rules say
so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from itertools import chain

from langchain_core.messages import BaseMessage

from choreo_agents.chat import Described, own_turns
from choreo_agents.engine import Engine
from choreo_agents.engine.transfer import Leases
from choreo_agents.errors import ContextLengthError, HandleError
from choreo_agents.graph.answers import NO_REFERENCE, UNPROVEN, encoding_of
from choreo_agents.graph.state import HandleEntry, is_input, length_for
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.graph.view.entries import EncodedEntries, calls_of
from choreo_agents.graph.view.imported_prompt import imported_by
from choreo_agents.graph.view.merged_branches import MergedBranches
from choreo_agents.graph.view.placed_view import PlacedView, TurnMerger
from choreo_agents.graph.view.reader_rules import CallReader
from choreo_agents.graph.view.rendered_view import RenderedView
from choreo_agents.graph.view.view import SeenEntry, Summary, seen, siblings
from choreo_agents.graph.view.view_encoder import (
    ViewEncoder,
    keeps_thoughts,
    without_thoughts,
)
from choreo_agents.graph.visibility import START_SOURCE, source_of_author


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
        self._calls = calls_of(messages)
        self.attends_to_answers = False
        """True if the view has the encoding of a chat model's answer, which may have attended to anything its function
        reads."""
        self.words_of: dict[str, str] = {}
        """Authors of whom only text is read where KV should be, and the reason."""
        self._imported = imported_by(reader.agent, engine)
        self._modules: Leases | None = None
        self._branches = MergedBranches(self.bound, reader)
        self.rendered = RenderedView(reader)
        """The view as chat messages."""
        self.summary: str | None = None
        """Text in place of the messages outside the reader's history."""
        self._turns = TurnMerger(self.bound)
        self.encoded = EncodedEntries(self.bound, reader, self._turns, messages, entries, earliest)
        self.showing = ViewEncoder(self.bound, reader, self.encoded, self._turns, self._branches.stands_for)

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
        view, is_instructed = await self._instructions(system, tools)
        await self.encoded.encode_new()
        items, text_only = seen(self._reader, self.encoded.all, self._calls)
        shown, dropped = self._split_history(await self.encoded.encode_foreign(items))
        self._note_words_of(shown, text_only)
        if not is_instructed and not (shown and self.showing.instructs(shown[0].entry)):
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
        for group in siblings(shown, parallel=self.is_parallel):
            await self._append_group(view, group)
            items = list(chain(*group))
            self._branches.record(view, items, ends=any(is_input(e) or self._reader.has_said(e) for e, _ in items))
            for entry, rule in items:
                if (words := self.showing.in_mode(entry, rule.mode)) is not None:
                    self.rendered.add_message(entry, self._as_seen(entry, words))
        self.showing.copies += await self._branches.append_boundaries(view)
        return view

    async def _instructions(self, system: str | None, tools: Described) -> tuple[PlacedView, bool]:
        """Return the view before all messages, and whether it instructs the reader: the root, imported modules, and its
        own system prompt with its tools."""
        public, imported, adapter = self._rules.shared_system, self._imported, self._reader.agent.adapter
        await self._turns.begin(public)
        self.rendered.begin(public, system, tools, () if imported is None else imported.parts)
        view = self._turns.root.copy()
        if imported is not None:
            # A schema brings the template's start of a conversation: an empty root would repeat it.
            view = PlacedView()
            for handle in () if public is None else await self._turns.whole_root(public):
                view.add(handle)
            self._modules = await imported.lease()
            modules = [self.bound.grant(handle) for handle in self._modules.handles]
            self.showing.lasting |= {handle.id for handle in modules}
            await imported.place(view, modules, self._reader.system, self.bound, adapter)
        is_later = bool(public) or imported is not None
        own = own_turns(system, tools, self._engine.chat, later=is_later)
        await self._turns.append_turns(view, own, self._reader.system, adapter)
        return view, is_later or bool(own)

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

    @property
    def is_parallel(self) -> bool:
        """True if sibling messages start at one position."""
        return self._rules.positions == "parallel" and self._engine.method == "choreo"

    def outgrown(self, error: ContextLengthError) -> ContextLengthError:
        """Return the error with the source whose messages take most of the view, and advice to make them fewer."""
        tokens: Counter[str] = Counter()
        author = self._place.author
        reader = author.rsplit("|", maxsplit=1)[-1]
        for entry, _ in seen(self._reader, self.encoded.all, self._calls)[0]:
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

    def _note_words_of(self, shown: Sequence[SeenEntry], text_only: Collection[str]) -> None:
        """Record where text is read instead of KV: answers kept from the reader, and branches without an encoding to
        merge."""
        for entry, rule in shown:
            # It stays set when the answer is removed later: the new message has attended to it.
            self.attends_to_answers |= rule.mode.shares_kv and bool(entry.get("answered"))
            if entry["author"] in text_only:
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

    def release(self) -> None:
        """Release what was encoded for this call alone, and all but one lease of what is shared."""
        with suppress(HandleError):  # a scope may have ended meanwhile
            for handle in self.bound.shared:
                self._engine.release(handle, keep_last=True)
            for handle in self.showing.copies:
                self._engine.release(handle)
        if self._modules is not None:
            self._modules.release()

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
                inputs = {self.bound.handle(entry).id for entry in self.encoded.all if is_input(entry)}
                descents = self._engine.inspect.descent([first], ())
                attended |= {source for parent in attended for source in descents[parent].sources if source in inputs}
                so_far.end = before.end_of(attended)
            shown = len(so_far.handles)
            for entry, rule in items:
                await self.showing.append(so_far, entry, rule)
            if len(group) > 1:
                await self._turns.close(so_far)
            view.extend(so_far, shown)
