"""Builds one reader's view: encodes new messages, places visible ones, and encodes text again where the rules say
so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig

from choreo_agents.chat import own_turns
from choreo_agents.engine.transfer import Leases
from choreo_agents.errors import ContextLengthError
from choreo_agents.graph.answers import NO_REFERENCE, UNPROVEN, encoding_of
from choreo_agents.graph.prompts import called, text_of
from choreo_agents.graph.state import HandleEntry, is_input, length_for
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.graph.view.entries import EncodedEntries
from choreo_agents.graph.view.imported_prompt import imported_by
from choreo_agents.graph.view.merged_branches import MergedBranches
from choreo_agents.graph.view.placed_view import PlacedView, TurnMerger
from choreo_agents.graph.view.rendered_view import RenderedView
from choreo_agents.graph.view.view import SeenEntry, calls_of, seen, siblings
from choreo_agents.graph.view.view_encoder import ViewEncoder, keeps_thoughts, without_thoughts
from choreo_agents.graph.visibility import START_SOURCE, source_of_author
from choreo_agents.kv.handle import MessageHandle


class ViewBuilder:
    """Builder of the view of one call of one node. Lives as long as the call.

    Args:
        encoded: The entries of the messages in the graph's state, and their reader.
    """

    def __init__(self, encoded: EncodedEntries) -> None:
        self._encoded, self._reader, self._rules = encoded, encoded.reader, encoded.reader.rules
        self._engine, self._agent = self._reader.engines[0], self._reader.agent
        self.bound = BoundEngine(self._engine, self._reader.place.node)
        self._calls = calls_of(encoded.messages)
        self._is_parallel = self._rules.positions == "parallel" and self._engine.method == "choreo"
        """True if sibling messages start at one position."""
        self.attends_to_answers = False
        """True if the view has the encoding of a chat model's answer, which may have attended to anything its function
        reads."""
        self.words_of: dict[str, str] = {}
        """Authors of whom only text is read where KV should be, and the reason."""
        self._imported = imported_by(self._agent, self._engine)
        self._modules: Leases | None = None
        self._branches = MergedBranches(self.bound, self._reader)
        self.rendered: RenderedView
        """The view as chat messages."""
        self.summary: str | None = None
        """Text in place of the messages outside the reader's history."""
        self._turns = TurnMerger(self.bound)
        self._encoder = ViewEncoder(self.bound, encoded, self._turns, self._branches.stands_for)

    async def view(self, system: str | None, state: Any, config: RunnableConfig) -> PlacedView:
        """Encode the messages that have no encoding yet, and assemble all that the reader may see.

        Args:
            system: The agent's own system prompt.
            state: State of the graph, for the function that makes a text in place of messages outside the history.
            config: Config of the node, for the same.
        """
        limit, encoder = self._agent.history, self._encoder
        view, is_instructed = await self._instructions(system)
        await self._encoded.encode_new(self.bound, self._turns)
        items, text_only = seen(self._reader, self._encoded.all, self._calls)
        shown, dropped = await encoder.encode_foreign(items), list[SeenEntry]()
        if limit is not None:
            shown, dropped = limit.split(shown, encoder.length, lambda item: encoder.instructs(item.entry), self._calls)
        self._note_words_of(shown, text_only)
        if not is_instructed and not (shown and encoder.instructs(shown[0].entry)):
            for handle in await self._turns.default_instructions():
                view.add(handle)
        if dropped and limit is not None and limit.summary is not None:
            text = await called(limit.summary, [self._dropped_messages(dropped), state], config)
            self.summary = text_of(self._agent.name, "prompt", text)
            if self.summary is not None:
                await encoder.append_prompt(view, self.summary)
            self.rendered.ask(self.summary, confidential=any(entry["confidential"] for entry, _ in dropped))
        await self._branches.prepare(shown)
        for group in siblings(shown, parallel=self._is_parallel):
            first, items = len(view.handles), list(chain(*group))
            await self._append_group(view, group)
            ends = any(is_input(entry) or self._reader.has_said(entry) for entry, _ in items)
            self._branches.record(view, first, items, ends=ends)
            for entry, rule in items:
                if (words := encoder.in_mode(entry, rule.mode)) is not None:
                    self.rendered.add_message(entry, self._as_seen(entry, words))
        await self._branches.append_boundaries(view)
        return view

    async def ask(self, view: PlacedView, prompt: str | None) -> MessageHandle | None:
        """Append the agent's prompt, if it has one, as a user's turn, and close the turn."""
        self.rendered.ask(prompt)
        handle = None if prompt is None else await self._encoder.append_prompt(view, prompt)
        await self._turns.close(view)
        return handle

    async def _instructions(self, system: str | None) -> tuple[PlacedView, bool]:
        """Return the view before all messages, and whether it instructs the reader: the root, imported modules, and its
        own system prompt with its tools."""
        public, imported, adapter = self._rules.shared_system, self._imported, self._agent.adapter
        await self._turns.begin(public)
        self.rendered = RenderedView(self._reader, system, () if imported is None else imported.parts)
        view = self._turns.root.copy()
        if imported is not None:
            # A schema brings the template's start of a conversation: an empty root would repeat it.
            view = PlacedView()
            for handle in () if public is None else await self._turns.whole_root(public):
                view.add(handle)
            self._modules = await imported.lease()
            modules = [self.bound.grant(handle) for handle in self._modules.handles]
            self._encoder.lasting |= {handle.id for handle in modules}
            await imported.place(view, modules, self._reader.system, self.bound, adapter)
        is_later = bool(public) or imported is not None
        own = own_turns(system, self._agent.tools, self._engine.chat, later=is_later)
        await self._turns.append_turns(view, own, self._reader.system, adapter)
        return view, is_later or bool(own)

    def _dropped_messages(self, dropped: Sequence[SeenEntry]) -> list[BaseMessage]:
        """Return messages outside the reader's history, with no more text than its view would have had."""
        for entry, _ in dropped:
            self._encoder.allows(entry, words_only=True)
        messages = [(entry, self._encoder.in_mode(entry, rule.mode)) for entry, rule in dropped]
        return [self._as_seen(entry, words) for entry, words in messages if words is not None]

    def _as_seen(self, entry: HandleEntry, words: BaseMessage) -> BaseMessage:
        """Return a message without its thoughts, unless it is the reader's own and the chat template shows these."""
        if (shorter := self._branches.summaries.get(self.bound.handle(entry).id)) is not None:
            return words.model_copy(update={"content": shorter})
        own = self._reader.has_said(entry) and keeps_thoughts(self._engine.chat, entry)
        return words if own else without_thoughts(words)

    def outgrown(self, error: ContextLengthError) -> ContextLengthError:
        """Return the error with the source whose messages take most of the view, and advice to make them fewer."""
        tokens: Counter[str] = Counter()
        author = self._reader.place.author
        reader = author.rsplit("|", maxsplit=1)[-1]
        for entry, _ in seen(self._reader, self._encoded.all, self._calls)[0]:
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
            message = self._encoder.in_state(entry)
            if message is not None and not (is_input(entry) and (self._rules.node or message.type != "ai")):
                claimed = entry.get("unverified_author")
                why = UNPROVEN if claimed else encoding_of(message, self._reader.engines)
                author = claimed["author"] if claimed else entry["author"]
                said_by = "its input" if author == START_SOURCE else author
                self.words_of[said_by] = why if isinstance(why, str) else NO_REFERENCE

    def release(self) -> None:
        """Release what was encoded for this call alone, and all but one lease of what is shared."""
        self.bound.release()
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
            if self._is_parallel and first.id in self._branches.stands_for:
                # A branch that read a re-encoded copy of the input still stands behind the input.
                attended = {parent.id for parent in self._engine.inspect.ancestors(first)}
                inputs = {self.bound.handle(entry).id for entry in self._encoded.all if is_input(entry)}
                descents = self._engine.inspect.descent([first], ())
                attended |= {source for parent in attended for source in descents[parent].sources if source in inputs}
                so_far.end = before.end_of(attended)
            shown = len(so_far.handles)
            for entry, rule in items:
                await self._encoder.append(so_far, entry, rule)
            if len(group) > 1:
                await self._turns.close(so_far)
            view.extend(so_far, shown)
