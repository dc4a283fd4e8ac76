"""Appends messages to a view, as its reader sees each: as they were encoded, or their words encoded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from choreo_agents.engine import Prefill
from choreo_agents.engine.calls import Content
from choreo_agents.engine.messages.message import thinker
from choreo_agents.errors import VisibilityError
from choreo_agents.graph.audit.guard import RuntimeGuard
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.graph.view.placed_view import PlacedView, TurnMerger
from choreo_agents.graph.view.reader_rules import CallReader
from choreo_agents.graph.view.reencoding import ReaderWords, confidential_of, context_path
from choreo_agents.graph.view.view import SeenEntry
from choreo_agents.graph.visibility import REENCODED, VisibilityRule
from choreo_agents.graph.words.entries import is_forgotten, is_input
from choreo_agents.graph.words.thoughts import recalled
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import PromptText, instructions, question


class ViewEncoder:
    """What one call of one reader is shown.

    Args:
        bound: Its engine.
        reader: Who reads.
        words: What was said.
        turns: What stands around messages.
        stands_for: What is shown for merged messages, by their handles' ids.
    """

    def __init__(
        self,
        bound: BoundEngine,
        reader: CallReader,
        words: ReaderWords,
        turns: TurnMerger,
        stands_for: Mapping[str, MessageHandle],
    ) -> None:
        self._bound = bound
        self._engine = bound.engine
        self._reader = reader
        self._rules = reader.rules
        self._words = words
        self._turns = turns
        self._stands_for = stands_for
        self._entries: Sequence[HandleEntry] = ()
        self._watches: list[RuntimeGuard] = []
        self.copies: list[MessageHandle] = []
        """Words that were encoded again for this call alone."""
        self.lasting: set[str] = set()
        """What graph state keeps of what was appended, and modules that others are told, too, by id."""
        self._prompt: MessageHandle | None = None

    def begin(self, entries: Sequence[HandleEntry]) -> None:
        """Take what was said, each message of the view with an encoding of the reader's model."""
        reader, self._entries = self._reader, entries
        guards = [g for g in (reader.rules.guard, *reader.rules.around) if g.hidden or any(g.forbidden.values())]
        self._watches = [
            RuntimeGuard(guard, self._engine, reader.place.author, reader.others, entries) for guard in guards
        ]

    async def ask(self, view: PlacedView, prompt: str | None) -> MessageHandle | None:
        """Append what the agent is asked, if anything, as a user's; then it is the agent's turn."""
        if prompt is not None:
            self._prompt = await self.tell(view, prompt)
        await self._turns.close(view)
        return self._prompt

    async def _asked(self, view: PlacedView, prompt: str, *, again: bool = False) -> MessageHandle:
        said = question(prompt, self._engine.chat)
        await self._turns.lead_to(view, said.kind)
        author = self._reader.system
        [handle] = await self._bound.aprefill(
            [self._own(said.text, view, author=author, role="user", recomputed=again)]
        )
        return handle

    async def tell(self, view: PlacedView, text: str) -> MessageHandle:
        """Append what the agent is asked, or told in place of what it does not keep, as a user's."""
        made = await self._asked(view, text)
        self.copies.append(made)
        view.add(made)
        return made

    def _own(self, words: Content, view: PlacedView, **said: Any) -> Prefill:
        """What is encoded for this reader alone, behind its view."""
        return Prefill(words, view.handles, view.offsets, view.end, adapter=self._reader.agent.adapter, **said)

    def keep_prompt(self) -> None:
        """The agent has spoken: what it was asked stays with what it said."""
        self.copies = [copy for copy in self.copies if copy != self._prompt]

    def length(self, seen: SeenEntry) -> int:
        """How many tokens a message takes in the view, with what stands before it."""
        entry, rule = seen
        if rule.mode.encodes_again or not self._reader.has_said(entry):
            kind = self._words.kind(entry) if rule.mode.shares_kv else "part"
            return self._words.length(entry, rule.mode) + self._turns.length(kind)
        prompt, shown = entry.get("prompt"), recalled(self._engine, entry, self._words.of(entry))
        length = shown.length if isinstance(shown, MessageHandle) else len(self._engine.model.encode(shown))
        return length + (0 if prompt is None else int(prompt["length"]) + self._turns.length("part"))

    def admits(self, entry: HandleEntry, *, words_only: bool) -> bool:
        """Tell whether the reader may attend to a message as it is encoded; raise `VisibilityError` if a policy keeps
        from it also what that says."""
        watches = () if self._reader.has_said(entry) else self._watches
        admitted = [watch.allows(entry, words_only=words_only) for watch in watches]
        return all(admitted)

    async def append(self, view: PlacedView, entry: HandleEntry, rule: VisibilityRule) -> None:
        """Append a message by the rule for its source."""
        handle = self._bound.handle(entry)
        own, reencode = self._reader.has_said(entry), rule.mode.encodes_again
        if not self.admits(entry, words_only=reencode) or reencode:
            shown = await self._reencoded(view, entry, handle, rule)
        else:
            prompt = entry.get("prompt")
            if own and prompt is not None:
                await self._asked_before(view, prompt, entry.get("prompt_text"))
            found = recalled(self._engine, entry, self._words.of(entry)) if own else handle
            if isinstance(found, MessageHandle):
                shown = await self._as_encoded(view, entry, found)
            else:
                shown = await self._thought_again(view, entry, found)
            if shown.id == handle.id:
                self.lasting.add(shown.id)
        view.add(shown, stands_for=handle)

    async def _as_encoded(self, view: PlacedView, entry: HandleEntry, handle: MessageHandle) -> MessageHandle:
        """A message's own encoding, or what stands for it."""
        if self._is_first(view) and (text := self._words.first(entry, handle)) is not None:
            kind = instructions("", self._engine.chat, later=False).kind
            await self._turns.lead_to(view, kind)
            call = Prefill(text, [*view.handles], author=entry["author"], source=handle)
            [made] = await self._bound.ask_for([call])
            return made
        await self._turns.lead_to(view, self._words.kind(entry))
        return self._bound.grant(self._stands_for.get(handle.id, handle))

    def _lasts(self, view: PlacedView) -> bool:
        """Whether all in a view stays when the call is over."""
        kept = self.lasting.union(each.id for each in self._bound.shared)
        return all(parent.id in kept for parent in view.handles)

    async def _thought_again(self, view: PlacedView, entry: HandleEntry, said: PromptText) -> MessageHandle:
        """A message of one's own with its thoughts, as they stand in its words."""
        await self._turns.lead_to(view, self._words.kind(entry))
        source, author = MessageHandle.model_validate(entry["handle"]), thinker(entry["author"])
        call = self._own(said, view, author=author, role="assistant", confidential=True, source=source)
        [made] = await self._bound.aprefill([call])
        self.copies.append(made)
        return made

    def _is_first(self, view: PlacedView) -> bool:
        """Whether nobody has said anything so far."""
        is_plain = self._reader.agent.imported is None and not self._rules.shared_system
        return is_plain and len(view.handles) == len(self._turns.root.handles)

    async def _asked_before(self, view: PlacedView, prompt: Mapping[str, Any], asked: str | None) -> None:
        """Append what stood before a message of one's own; its words, if no more than they is left of it."""
        handle = MessageHandle.model_validate(prompt)
        if not is_forgotten(self._engine, handle):
            await self._turns.lead_to(view, question("", self._engine.chat).kind)
            view.add(self._bound.grant(handle))
            self.lasting.add(handle.id)
        elif asked is not None:
            lasts = self._lasts(view)
            made = await self._asked(view, asked, again=True)
            if made.id != handle.id:
                # Else it is what it was, and stays with what was said. Behind what lasts the next call finds it again.
                (self._bound.shared if lasts else self.copies).append(made)
            view.add(made)

    async def _reencoded(
        self, view: PlacedView, entry: HandleEntry, handle: MessageHandle, rule: VisibilityRule
    ) -> MessageHandle:
        """A fresh encoding of a message's words, as the rule has them and in its scope."""
        own, is_readers = self._reader.has_said(entry), rule.scope == "reader"
        author, confidential = entry["author"], entry["confidential"]
        scope = view if is_readers else self._turns.root.copy()
        for name in rule.contexts:
            await self._named_context(name, scope)
        later = not (self._is_first(view) and self._is_first(scope))
        words, kind = self._words.again(entry, handle, rule.mode, later=later, own=own)
        await self._turns.lead_to(scope, kind)
        if not is_readers:
            await self._turns.lead_to(view, kind)
            copy = Prefill(words, scope.handles, author=author, confidential=confidential, source=handle)
            [made] = await self._bound.ask_for([copy])
            return made
        copy = self._own(words, view, author=author, confidential=confidential, source=handle)
        [made] = await self._bound.aprefill([copy])
        # Where input stands right behind the agent's own system prompt, its next call finds it there again. And what is
        # encoded again where it stands already is what the graph's state keeps.
        kept = made.id == handle.id or (is_input(entry) and self._lasts(view))
        (self._bound.shared if kept else self.copies).append(made)
        return made

    async def _named_context(self, name: str, view: PlacedView) -> None:
        """Append the messages of a private context to what words are encoded behind.

        Args:
            name: As its graph calls it.
            view: The root and the contexts named before.
        """
        path, rules, turns = context_path(name, self._reader.place), self._rules, self._turns
        for text in rules.systems.get(name, ()):
            is_first = rules.shared_system is None and len(view.handles) == len(turns.root.handles)
            await turns.tell(view, [instructions(text, turns.chat, later=not is_first)], path, None)
        if name not in rules.systems and name not in rules.confidential:
            raise VisibilityError(f"there is no private context {name!r} that words could be encoded in")
        for entry in confidential_of(path, self._entries):
            handle = self._bound.handle(entry)
            tokens, kind = self._words.again(entry, handle, REENCODED, own=self._reader.has_said(entry))
            await turns.lead_to(view, kind)
            call = Prefill(tokens, view.handles, author=path, confidential=True, source=handle)
            [made] = await self._bound.ask_for([call])
            view.add(made)
