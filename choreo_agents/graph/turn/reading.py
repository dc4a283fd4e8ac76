"""Makes one reader's view: what is new is encoded, what may be seen is placed, words are encoded again where told."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, Protocol

from langchain_core.messages import BaseMessage

from choreo_agents.engine import Engine, Prefill
from choreo_agents.engine.calls import Content
from choreo_agents.engine.kv_transfer import Leases
from choreo_agents.errors import ContextLengthError, HandleError
from choreo_agents.graph.provenance.notes import digest_of, handle_of, is_confidential, persona_of, writer_of
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.turn.bound_engine import BoundEngine
from choreo_agents.graph.turn.context_overflow import advised
from choreo_agents.graph.turn.entries import entries_of, is_encoded, is_forgotten, is_input, known_handle, said_in
from choreo_agents.graph.turn.imported_prompt import ImportedPrompt
from choreo_agents.graph.turn.inputs import turn_of
from choreo_agents.graph.turn.merged_branches import MergedBranches, MergeSpec
from choreo_agents.graph.turn.placed_view import PlacedView
from choreo_agents.graph.turn.reader_rules import ReaderRules
from choreo_agents.graph.turn.reencoding import ReaderWords, named_context
from choreo_agents.graph.turn.run_place import RunPlace
from choreo_agents.graph.turn.view import SeenEntry, is_own, visible
from choreo_agents.graph.visibility import START_SOURCE, Rule, source_of_author
from choreo_agents.kv.handle import MessageHandle

_PUBLIC_ROOT = "public root"


class OffsetOf(Protocol):
    """Says where a message of so many tokens stands in a view that is there already."""

    def __call__(self, length: int, *, parallel: bool) -> int: ...


@dataclass(frozen=True)
class CallReader:
    """Who reads in one call of one node, and how."""

    place: RunPlace
    persona: str
    """Whose node it is, behind the subgraphs."""
    rules: ReaderRules
    adapter: str | None
    """Encodes what is the reader's own."""
    imported: ImportedPrompt | None
    """What it is told by a prompt of a schema, in place of a system prompt."""
    merging: MergeSpec | None
    """Whose messages are merged."""


class Reading:
    """What one call of one node sees. Lives as long as the call.

    Args:
        engine: Encodes it.
        reader: Who reads.
        messages: The words in the graph's state.
        entries: All that was said.
        earliest: The superstep that the reader speaks in at least.
    """

    def __init__(
        self,
        engine: Engine,
        reader: CallReader,
        messages: Sequence[BaseMessage],
        entries: list[HandleEntry],
        earliest: int = 0,
    ) -> None:
        self.bound = BoundEngine(engine, reader.place.node)
        self._engine = engine
        self._reader = reader
        self._rules = reader.rules
        self._place = reader.place
        self._persona = reader.persona
        self._messages = messages
        self._words = ReaderWords(self.bound, messages)
        self.entries = entries
        """All that was said; what this call has encoded first is among them once it has a view."""
        self.inputs: list[HandleEntry] = []
        """Entries that this call has made of messages which no node had encoded."""
        self._modules: Leases | None = None
        self._branches = MergedBranches(self.bound, reader.place.author, reader.merging, reader.adapter)
        self.starts: dict[str, int] = {}
        """Where each message of the view stands, by its id: with what its own speaker was asked before it."""
        self.shown: dict[str, MessageHandle] = {}
        """What stands there for it: it, a copy of it, or its words encoded again."""
        self._earliest = earliest
        self.superstep = self._next_superstep(entries)
        self.seen: list[BaseMessage] = []
        """The messages of the view, as chat messages."""
        self._asked: list[MessageHandle] = []
        """Prefills that others ask for too, or this agent's next call: one lease of each stays."""
        self._copies: list[MessageHandle] = []
        """Words that were encoded again for this call alone."""
        self._root: list[MessageHandle] = []
        self._prompt: MessageHandle | None = None
        self._watch = reader.rules.guard.watch(engine, reader.place.author)

    async def view(self, system: str | None) -> PlacedView:
        """Encode what nobody has yet, and put together all that the reader may see."""
        self._root = await self._shared_root()
        own = await self._prefill_turns(system)
        self.entries = list({entry["message_id"]: entry for entry in [*self.entries, *self.inputs]}.values())
        self.superstep = self._next_superstep(self.entries)
        view, imported = PlacedView(), self._reader.imported
        for handle in [*(self._root if imported is None else imported.behind(self._root)), *own]:
            view.add(handle)
        if imported is not None:
            self._modules = await imported.lease()
            modules = [self.bound.grant(handle) for handle in self._modules.handles]
            await imported.place(view, modules, f"{self._persona}.system", self._ask_for_own)
        shown = visible(self.entries, self._place.author, self._rules.sources, self._persona)
        self._copies += await self._branches.stand_in(shown)
        self._branches.appended(view)
        for group in _groups(shown, parallel=self.is_parallel):
            await self._show(view, group)
            said = list(chain(*group))
            self._branches.appended(view, said, ends=any(is_input(e) or self._is_own(e) for e, _ in said))
            self.seen += [words for entry, _ in said if (words := self._words.of(entry)) is not None]
        self._copies += await self._branches.read_behind(view)
        return view

    async def late(
        self, update: Mapping[str, Any], view: PlacedView, place: OffsetOf
    ) -> AsyncGenerator[tuple[HandleEntry, MessageHandle, int]]:
        """What the reader may see of a branch that came after its view was made, as it is to be shown, and where.

        Args:
            update: Of the state, by the branch.
            view: The reader's, which stays as it is.
            place: Says where a message of so many tokens stands.
        """
        known = {entry["message_id"] for entry in self.entries}
        self.entries = [*self.entries, *(new := [e for e in said_in(update) if e["message_id"] not in known])]
        self._words.hear(update.get("messages") or [])
        self.superstep = self._next_superstep(self.entries)
        everything = visible(self.entries, self._place.author, self._rules.sources, self._persona)
        shown = [seen for seen in everything if seen.entry in new]
        self._copies += await self._branches.stand_in(shown)
        for entry, rule in shown:
            there = view.copy()
            asked = (entry.get("prompt") or {}).get("length", 0) if self._is_own(entry) else 0
            there.resume_at(place(asked + self._words.length(entry, rule.mode), parallel=self.is_parallel))
            await self._append(there, entry, rule)
            self._copies += await self._branches.read_behind(there, len(view.handles))
            for at in range(len(view.handles), len(there.handles)):
                yield entry, there.handles[at], there.offsets[at]

    @property
    def is_parallel(self) -> bool:
        """Whether siblings stand at one offset."""
        return self._rules.positions == "parallel" and self._engine.method == "choreo"

    async def ask(self, view: PlacedView, prompt: str) -> MessageHandle:
        """Append what the agent is asked, as a user's turn of its own."""
        turn = self._engine.chat.turn("user", prompt)
        author = f"{self._persona}.system"
        [handle] = await self.bound.aprefill([self._own(turn, view, author=author, role="user")])
        self._prompt = handle
        self._copies.append(handle)
        view.add(handle)
        return handle

    def _own(self, words: Content, view: PlacedView, **said: Any) -> Prefill:
        """What is encoded for this reader alone, behind its view."""
        return Prefill(words, view.handles, view.offsets, view.end, adapter=self._reader.adapter, **said)

    def keep_prompt(self) -> None:
        """The agent has spoken: what it was asked stays with what it said."""
        self._copies = [copy for copy in self._copies if copy != self._prompt]

    def outgrown(self, error: ContextLengthError) -> ContextLengthError:
        """The same error, with the edge whose messages take most of the view, and what would make them fewer."""
        seen = visible(self.entries, self._place.author, self._rules.sources, self._persona)
        return advised(error, seen, self._place.author, self._persona)

    def _next_superstep(self, entries: Sequence[HandleEntry]) -> int:
        return max(self._earliest, 1 + max((entry["superstep"] for entry in entries), default=-1))

    def _is_own(self, entry: HandleEntry) -> bool:
        return is_own(entry, self._place.author, self._persona)

    def release(self) -> None:
        """Give back what was encoded for this call alone, and all but one lease of the rest."""
        with suppress(HandleError):  # a scope may have ended meanwhile
            for handle in self._asked:
                self._engine.release(handle, spare_only=True)
            for handle in self._copies:
                self._engine.release(handle)
        if self._modules is not None:
            self._modules.release()

    async def _shared_root(self) -> list[MessageHandle]:
        """The public root, encoded once for everybody; empty if the model has no begin-of-sequence token either."""
        text = self._engine.chat.root(self._rules.public)
        return await self._ask_for([Prefill(text, author=_PUBLIC_ROOT, role="system")] if text else [])

    async def _ask_for(self, calls: Sequence[Prefill]) -> list[MessageHandle]:
        handles = await self.bound.aprefill(calls)
        self._asked += handles
        return handles

    async def _ask_for_own(self, calls: Sequence[Prefill]) -> list[MessageHandle]:
        return await self._ask_for([replace(call, adapter=self._reader.adapter) for call in calls])

    async def _prefill_turns(self, system: str | None) -> list[MessageHandle]:
        """The agent's own system prompt, and entries for messages that no node has encoded as they now stand."""
        chat = self._engine.chat
        before = {entry["message_id"]: entry for entry in self.entries}
        new = [
            m
            for m in self._messages
            if not is_encoded(m, before) or is_forgotten(self._engine, before[str(m.id)]["handle"])
        ]
        calls: list[Prefill] = []
        if system is not None:
            author, turn = f"{self._persona}.system", chat.turn("system", system)
            calls.append(Prefill(turn, self._root, author=author, role="system", adapter=self._reader.adapter))
        authors = [_author(m, before.get(str(m.id))) or _writer(m, self._rules, self._place.author) for m in new]
        edited = [known_handle(self._engine, handle_of(m, self._engine.model.adapter.fingerprint)) for m in new]
        marks = [before[m.id]["confidential"] if m.id in before else is_confidential(m) for m in new]
        calls += [
            Prefill(turn_of(m, chat), self._root, author=author, confidential=mark, source=source)
            for m, author, mark, source in zip(new, authors, marks, edited, strict=True)
        ]
        handles = await self._ask_for(calls)
        own, rest = handles[: len(calls) - len(new)], handles[len(calls) - len(new) :]
        self.inputs += entries_of(new, authors, rest, marks, before, self.superstep)
        return own

    async def _show(self, view: PlacedView, group: Sequence[Sequence[SeenEntry]]) -> None:
        """Append a group of siblings, which start where the view ends; or where they left it, if they are merged."""
        before = view.copy()
        for said in group:
            so_far, first = before.copy(), MessageHandle.model_validate(said[0].entry["handle"])
            if self.is_parallel and first.id in self._branches.stands_for:
                so_far.resume_at(before.behind({each.id for each in self._engine.inspect.ancestors(first)}))
            shown = len(so_far.handles)
            for entry, rule in said:
                await self._append(so_far, entry, rule)
            view.extend(so_far, shown)

    async def _append(self, view: PlacedView, entry: HandleEntry, rule: Rule) -> None:
        handle = MessageHandle.model_validate(entry["handle"])
        self.starts[entry["message_id"]] = view.end
        own, reencode = self._is_own(entry), rule.mode.encodes_again
        if not own:
            reencode = not self._watch.admits(entry, self.entries, words_only=reencode) or reencode
        if reencode:
            shown = await self._reencoded(view, entry, handle, rule)
        else:
            prompt = entry.get("prompt")
            if own and prompt is not None:
                await self._asked_before(view, prompt, entry.get("asked"))
            shown = self.bound.grant(self._branches.stands_for.get(handle.id, handle))
        self.shown[entry["message_id"]] = shown
        view.add(shown, stands_for=handle)

    async def _asked_before(self, view: PlacedView, prompt: Mapping[str, Any], asked: str | None) -> None:
        """Append what stood before a message of one's own; its words, if no more than they is left of it."""
        if not is_forgotten(self._engine, prompt):
            view.add(self.bound.grant(MessageHandle.model_validate(prompt)))
        elif asked is not None:
            turn = self._engine.chat.turn("user", asked)
            again = self._own(turn, view, author=f"{self._persona}.system", role="user")
            [made] = await self.bound.aprefill([again])
            if made.id != prompt["id"]:
                # Else it is what it was, and stays with what was said.
                self._copies.append(made)
            view.add(made)

    async def _reencoded(
        self, view: PlacedView, entry: HandleEntry, handle: MessageHandle, rule: Rule
    ) -> MessageHandle:
        """A fresh encoding of a message's words, as the rule has them and in its scope."""
        words = self._words.tokens(entry, handle, rule.mode)
        author, confidential = entry["author"], entry["confidential"]
        if rule.scope == "reader":
            copy = self._own(words, view, author=author, confidential=confidential, source=handle)
            [made] = await self.bound.aprefill([copy])
            # Where input stands right behind the agent's own system prompt, its next call finds it there again.
            lasting = [*self._asked, *(self._modules.handles if self._modules is not None else ())]
            kept = is_input(entry) and all(parent in lasting for parent in view.handles)
            (self._asked if kept else self._copies).append(made)
            return made
        parents = [*self._root]
        for name in rule.contexts:
            parents += await named_context(
                name, parents, self._place, self._rules, self.entries, self.bound, self._ask_for
            )
        copy = Prefill(words, parents, author=author, confidential=confidential, source=handle)
        [made] = await self._ask_for([copy])
        return made


def _groups(seen: Sequence[SeenEntry], *, parallel: bool) -> Iterator[list[list[SeenEntry]]]:
    """Siblings that stand at one offset, each a chain of messages that follow each other."""
    if not parallel:
        for one in seen:
            yield [[one]]
        return
    for (_, written), said in groupby(seen, key=lambda one: (one.entry["superstep"], is_input(one.entry))):
        if written:
            # What a person wrote is one conversation.
            yield [list(said)]
            continue
        yield [
            list(one)
            for _, one in groupby(
                said, key=lambda one: (one.entry["author"], one.entry["branch"], one.entry.get("call", 0))
            )
        ]


def _author(message: BaseMessage, known: HandleEntry | None) -> str | None:
    """Who said a message that has an entry: whoever did, unless a plain node has said it again in other words."""
    if known is None:
        return None
    said = known.get("digest") in (None, digest_of(message))
    again = START_SOURCE if said else writer_of(message)
    return known["author"] if again == START_SOURCE else again


def _writer(message: BaseMessage, rules: ReaderRules, reader: str) -> str:
    """Who wrote a message that has no entry. What an agent of no node here said openly is input."""
    author, known = writer_of(message), rules.guard.declared.names
    foreign = bool(rules.guard.declared.nodes) and source_of_author(author, reader) not in known
    return START_SOURCE if foreign and persona_of(message) and not is_confidential(message) else author
