"""Makes one reader's view: what is new is encoded, what may be seen is placed, words are encoded again where told."""

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
from choreo_agents.graph.state import HandleEntry, handle_for, is_of_agent, length_for, put_in
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.graph.view.merged_branches import MergedBranches
from choreo_agents.graph.view.placed_view import PlacedView, TurnMerger
from choreo_agents.graph.view.reader_rules import CallReader, ReaderRules
from choreo_agents.graph.view.reencoding import ReaderWords, confidential_of, context_path
from choreo_agents.graph.view.rendered_view import RenderedView
from choreo_agents.graph.view.view import SeenEntry, Summary, call_of, visible
from choreo_agents.graph.view.view_encoder import ViewEncoder
from choreo_agents.graph.visibility import EVERYONE, REENCODED, START_SOURCE, source_of_author
from choreo_agents.graph.words.entries import (
    callers_of,
    calls_of,
    entries_of,
    forgotten_among,
    is_encoded,
    is_input,
    live_handle,
)
from choreo_agents.graph.words.thoughts import recalls, without_thoughts
from choreo_agents.kv.handle import MessageHandle, base_model

UNKNOWN = "nothing keeps what it was computed from"


class ViewBuilder:
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
        earliest: int,
    ) -> None:
        self.bound = BoundEngine(engine, reader.place.node)
        self._engine = engine
        self._engines = (engine, *reader.others)
        self._reader = reader
        self._rules = reader.rules
        self._place = reader.place
        self._messages = messages
        self._calls = calls_of(messages)
        self._words = ReaderWords(self.bound, messages)
        self.entries = [self._as_read(entry) for entry in entries]
        """All that was said; what this call has encoded first is among them once it has a view."""
        self.inputs: list[HandleEntry] = []
        """Entries that this call has made of messages which no node had encoded."""
        self.lost: dict[str, tuple[HandleEntry, str]] = {}
        """What stood for messages that were encoded again, and why their encodings are of no use here: by message."""
        self.attends_to_answers = False
        """Whether it sees the encoding of what may have attended to anything."""
        self._in_words: set[str] = set()
        """Whose answers are read in their words since they may have attended to what is kept from the reader."""
        self.words_of: dict[str, str] = {}
        """Whose words alone are read where encodings were to be, and why."""
        self._modules: Leases | None = None
        self._branches = MergedBranches(self.bound, reader)
        self._earliest = earliest
        self.superstep = self._next_superstep(entries)
        self.rendered = RenderedView(reader)
        """What is read, as chat messages."""
        self.summary: str | None = None
        """What the reader is told in place of what it does not keep."""
        self._turns = TurnMerger(self.bound)
        self.showing = ViewEncoder(self.bound, reader, self._words, self._turns, self._branches.stands_for)

    async def view(
        self,
        system: str | None,
        tools: Described = (),
        *,
        summary: Callable[[Summary, Sequence[BaseMessage]], Awaitable[str | None]],
    ) -> PlacedView:
        """Encode what nobody has yet, and put together all that the reader may see.

        Args:
            system: The agent's own system prompt, and the `tools` that it may call.
            summary: Has a function make what is told in place of messages that the reader does not keep.
        """
        await self._turns.begin(self._rules.shared_system)
        view, imported = await self._start(), self._reader.agent.imported
        self.rendered.begin(self._rules.shared_system, system, tools, () if imported is None else imported.told)
        later = bool(self._rules.shared_system) or imported is not None
        own = own_turns(system, tools, self._engine.chat, later=later)
        if imported is None:
            await self._turns.tell(view, own, self._reader.system, self._reader.agent.adapter)
        await self._prefill_turns()
        self.entries = list({entry["message_id"]: entry for entry in [*self.entries, *self.inputs]}.values())
        self.superstep = self._next_superstep(self.entries)
        if imported is not None:
            self._modules = await imported.lease()
            modules = [self.bound.grant(handle) for handle in self._modules.handles]
            self.showing.lasting |= {each.id for each in modules}
            await imported.place(view, modules, self._reader.system, self.bound, self._reader.agent.adapter)
            await self._turns.tell(view, own, self._reader.system, self._reader.agent.adapter)
        shown, left = self._kept(await self._visible())
        self.showing.begin(self.entries)
        self._note_words_of(shown)
        told = bool(own) or bool(self._rules.shared_system) or imported is not None
        if not told and not (shown and self._words.instructs(shown[0].entry)):
            for handle in await self._turns.default_instructions():
                view.add(handle)
        keep = self._reader.agent.history
        if left and keep is not None and keep.summary is not None:
            self.summary = await summary(keep.summary, self._unkept(left))
            if self.summary is not None:
                await self.showing.tell(view, self.summary)
            self.rendered.ask(self.summary, confidential=any(entry["confidential"] for entry, _ in left))
        self.showing.copies += await self._branches.stand_in(shown)
        self._branches.appended(view)
        for group in _groups(shown, parallel=self.is_parallel):
            await self._show(view, group)
            said = list(chain(*group))
            self._branches.appended(view, said, ends=any(is_input(e) or self._reader.has_said(e) for e, _ in said))
            for entry, _ in said:
                if (words := self._words.of(entry)) is not None:
                    self.rendered.say(entry, self._as_seen(entry, words))
        self.showing.copies += await self._branches.read_behind(view)
        return view

    def _unkept(self, left: Sequence[SeenEntry]) -> list[BaseMessage]:
        """The words of messages that the reader does not keep, no more of them than it would have had in its view."""
        for entry, _ in left:
            self.showing.admits(entry, words_only=True)
        unkept = [(entry, self._words.seen(entry, rule.mode)) for entry, rule in left]
        return [self._as_seen(entry, words) for entry, words in unkept if words is not None]

    def _as_seen(self, entry: HandleEntry, words: BaseMessage) -> BaseMessage:
        """A message with the thoughts before it only if its reader's view has them: its own, as far as it recalls."""
        if (shorter := self._branches.shorter.get(self.bound.handle(entry).id)) is not None:
            return words.model_copy(update={"content": shorter})
        own = self._reader.has_said(entry) and recalls(self._engine.chat, entry)
        return words if own else without_thoughts(words)

    async def _visible(self) -> list[SeenEntry]:
        """What the reader sees, each message with an encoding of its model."""
        seen = self._seen()
        contexts = {context_path(name, self._place) for _, rule in seen for name in rule.contexts}
        named = [entry for path in contexts for entry in confidential_of(path, self.entries)]
        made = {entry["message_id"]: entry for entry in await self._encoded_here(seen, named)}
        if not made:
            return seen
        self.lost |= _unserved(made, self._engines)
        self.inputs = [*(entry for entry in self.inputs if entry["message_id"] not in made), *made.values()]
        self.entries = [made.get(entry["message_id"], entry) for entry in self.entries]
        return self._seen()

    async def _encoded_here(self, seen: Sequence[SeenEntry], named: Sequence[HandleEntry]) -> list[HandleEntry]:
        """The entries among these that had no encoding of the reader's model, with one: behind the public root, as
        input is, once for all readers of that model. It costs nothing until somebody attends to it.

        Args:
            seen: The messages of the view.
            named: Those in which words of the view are encoded, whose own words alone it sees.

        Raises:
            ForeignHandleError: The words are not in the graph's state; or, with `strict`, an encoding was to be read.
        """
        foreign = [each for each in seen if handle_for(each.entry, self.bound.model) is None]
        for entry, rule in foreign if self._rules.strict else ():
            if is_of_agent(entry) and rule.mode.shares_kv:
                raise self._refused(entry, "declare it 'reencoded', or compile without strict=True")
        wanted = [*(entry for entry, _ in foreign), *(e for e in named if handle_for(e, self.bound.model) is None)]
        different = list({entry["message_id"]: entry for entry in wanted}.values())
        calls: list[Prefill] = []
        for entry in different:
            if (message := self._words.in_state(entry)) is None:
                raise self._refused(entry, "its words are not in the graph's state: send the message itself, too")
            text, kind = message_turn(message, self._engine.chat, opening=opening_of(message))
            source = MessageHandle.model_validate(entry["handle"]) if is_of_agent(entry) else None
            told: dict[str, Any] = {"author": entry["author"], "confidential": entry["confidential"], "source": source}
            calls.append(Prefill(text, await self._turns.behind_root(kind), **told))
        handles = await self.bound.ask_for(calls)
        return [put_in(entry, handle) for entry, handle in zip(different, handles, strict=True)]

    def _refused(self, entry: HandleEntry, advice: str) -> ForeignHandleError:
        handle = MessageHandle.model_validate(entry["handle"])
        return ForeignHandleError(
            f"what {entry['author']!r} said is handle {handle.id!r} of model {handle.base_model!r}, and "
            f"{self._place.author!r} runs on {self.bound.model!r}: {advice}"
        )

    @property
    def is_parallel(self) -> bool:
        """Whether siblings stand at one offset."""
        return self._rules.positions == "parallel" and self._engine.method == "choreo"

    def outgrown(self, error: ContextLengthError) -> ContextLengthError:
        """The same error, with the source whose messages take most of the view, and what would make them fewer."""
        tokens: Counter[str] = Counter()
        author = self._place.author
        reader = author.rsplit("|", maxsplit=1)[-1]
        for entry, _ in self._seen():
            own = self._reader.has_said(entry)
            source = reader if own else source_of_author(entry["author"], author) or entry["author"]
            tokens[source] += length_for(entry, self.bound.model)
        if not tokens:
            return error
        [(source, count)] = tokens.most_common(1)
        what = "its own" if source == reader else f"{source!r}'s"
        advice = f"declare {source!r} to {reader!r} with history='last', or shorten the loop that both are in"
        if source == reader:
            advice = "bound what it keeps by Agent(history=...), or shorten the loop that it is in"
        elif source == START_SOURCE:
            what, advice = "input", "send less"
        return ContextLengthError(f"{error}. In the view of {reader!r}, {count} tokens are {what}: {advice}")

    def _kept(self, shown: list[SeenEntry]) -> tuple[list[SeenEntry], list[SeenEntry]]:
        """What the reader keeps in its view, and what it does not."""
        keep = self._reader.agent.history
        if keep is None:
            return shown, []
        return keep.split(shown, self.showing.length, lambda each: self._words.instructs(each.entry), self._calls)

    def _seen(self) -> list[SeenEntry]:
        rules, reader, calls = self._rules, self._reader, self._calls
        options: Any = {"persona": reader.persona, "undeclared": rules.undeclared, "unnamed": rules.unnamed}
        seen = visible(self.entries, self._place.author, rules.sources, calls=calls, **options)
        names = {each.entry["message_id"] for each in seen}
        # Somebody's confidential message that it does not see, in whichever graph that was said.
        is_kept = any(each["confidential"] and each["message_id"] not in names for each in self.entries)
        found = []
        for each in seen:
            answered = bool(each.entry.get("answered")) and each.rule.mode.shares_kv
            in_words = answered and (is_kept or is_input(each.entry) or reader.gets_words_of(each.entry))
            if in_words and not is_input(each.entry):
                self._in_words.add(each.entry["author"])
            found.append(each._replace(rule=replace(each.rule, mode=REENCODED)) if in_words else each)
        return found

    def _note_words_of(self, shown: Sequence[SeenEntry]) -> None:
        """Note whose encodings are not read though they were to be: kept from the reader, or of all that it merges."""
        for entry, rule in shown:
            # It stays so when the answer is removed: what is said now has attended to it.
            self.attends_to_answers |= rule.mode.shares_kv and bool(entry.get("answered"))
            if entry["author"] in self._in_words:
                self.words_of[entry["author"]] = (
                    "it may have attended to all that its function can read, and some of that is kept from the reader: "
                    "declare less private, or have an Agent say it"
                )
        for entry in () if self.words_of else self._branches.in_words(shown):
            message = self._words.in_state(entry)
            if message is not None and not (is_input(entry) and (self._rules.node or message.type != "ai")):
                claimed = entry.get("unverified_author")
                why = UNPROVEN if claimed else encoding_of(message, self._engines)
                author = claimed["author"] if claimed else entry["author"]
                said_by = "its input" if author == START_SOURCE else author
                self.words_of[said_by] = why if isinstance(why, str) else NO_REFERENCE

    def _as_read(self, entry: HandleEntry) -> HandleEntry:
        """An entry as the reader has it: in a graph of LangGraph's own what a function says that it does not declare is
        input, whoever else does."""
        declared = not _is_everybodys(source_of_author(entry["author"], self._place.author), self._rules)
        is_open = declared or "persona" in entry or "tool_node" in entry or entry["confidential"]
        return entry if is_open else HandleEntry(**{**entry, "author": START_SOURCE})

    def _next_superstep(self, entries: Sequence[HandleEntry]) -> int:
        return max(self._earliest, 1 + max((entry["superstep"] for entry in entries), default=-1))

    def release(self) -> None:
        """Give back what was encoded for this call alone, and all but one lease of the rest."""
        with suppress(HandleError):  # a scope may have ended meanwhile
            for handle in self.bound.shared:
                self._engine.release(handle, keep_last=True)
            for handle in self.showing.copies:
                self._engine.release(handle)
        if self._modules is not None:
            self._modules.release()

    async def _start(self) -> PlacedView:
        """What stands before all that the agent is told."""
        if self._reader.agent.imported is None:
            return self._turns.root.copy()
        # A schema starts as a conversation does: without words in it, a root would only say so twice.
        view, public = PlacedView(), self._rules.shared_system
        for handle in () if public is None else await self._turns.whole_root(public):
            view.add(handle)
        return view

    async def _prefill_turns(self) -> None:
        """Make entries for messages that no node has encoded as they now are."""
        chat = self._engine.chat
        known = {entry["message_id"]: entry for entry in self.entries}
        # Others have read some as input which are not that to this reader: it knows who said them.
        inputs = [m for m in self._messages if is_encoded(m, known) and is_input(known[str(m.id)])]
        news = {str(m.id) for m in inputs if _writer(m, self._rules, self._place.author) != START_SOURCE}
        before = {name: entry for name, entry in known.items() if name not in news}
        lost = forgotten_among(self._engine, before)
        new = [m for m in self._messages if not is_encoded(m, before) or str(m.id) in lost]
        self.lost |= {str(m.id): (before[str(m.id)], UNKNOWN) for m in new if is_encoded(m, before)}
        calls: list[Prefill] = []
        found: list[tuple[BaseMessage, str, bool, MessageHandle | str | None]] = []
        callers, called = callers_of(self._messages), tools_called(self._messages)
        for m in new:
            known_as, caller = before.get(str(m.id)), callers.get(str(m.id))
            author = writer_of(caller) if caller else _author(m, known_as)
            author = author or _writer(m, self._rules, self._place.author)
            mark = known_as["confidential"] if known_as else is_confidential(caller or m)
            answer = None if author == START_SOURCE else encoding_of(m, self._engines)
            found.append((m, author, mark, answer))
            if not isinstance(answer, MessageHandle):
                text, kind = message_turn(m, chat, called=called, opening=opening_of(m))
                source = live_handle(self._engine, handle_of(m))
                given: dict[str, Any] = {
                    "author": author,
                    "role": "tool" if isinstance(m, ToolMessage) else None,
                    "confidential": mark,
                    "source": source,
                }
                calls.append(
                    Prefill(text, await self._turns.behind_root(kind), recomputed=is_encoded(m, before), **given)
                )
        encoded = iter(await self.bound.ask_for(calls))
        said = [
            (m, author, mark, answer if isinstance(answer, MessageHandle) else next(encoded))
            for m, author, mark, answer in found
        ]
        made = entries_of(said, before, self.superstep, callers, [task.branch for task in self._place.around])
        for entry, (*_, answer) in zip(made, found, strict=True):
            if entry["message_id"] in news:
                entry["superstep"] = known[entry["message_id"]]["superstep"]
            if isinstance(answer, MessageHandle):
                entry["answered"] = True
            elif isinstance(answer, str):
                self.lost[entry["message_id"]] = entry, answer
        self.inputs += made

    async def _show(self, view: PlacedView, group: Sequence[Sequence[SeenEntry]]) -> None:
        """Append a group of siblings, which start where the view ends; or where they left it, if they are merged."""
        if len(group) > 1:
            # Each of them has what it needs around it: nothing depends on their order.
            await self._turns.close(view)
        before = view.copy()
        for said in group:
            so_far, first = before.copy(), self.bound.handle(said[0].entry)
            if self.is_parallel and first.id in self._branches.stands_for:
                # A branch that has read input in an encoding of its own stands behind that input all the same.
                attended = {each.id for each in self._engine.inspect.ancestors(first)}
                inputs = {self.bound.handle(entry).id for entry in self.entries if is_input(entry)}
                made = self._engine.inspect.descent([first], ())
                attended |= {source for each in attended for source in made[each].sources if source in inputs}
                so_far.end = before.behind(attended)
            shown = len(so_far.handles)
            for entry, rule in said:
                await self.showing.append(so_far, entry, rule)
            if len(group) > 1:
                await self._turns.close(so_far)
            view.extend(so_far, shown)


def _unserved(made: Mapping[str, HandleEntry], engines: Sequence[Engine]) -> dict[str, tuple[HandleEntry, str]]:
    """Those of these entries that stand for what models have said which nobody serves, by message."""
    served = {engine.model.adapter.fingerprint for engine in engines}
    why = "another model has said it, which is not served here"
    said = {name: entry for name, entry in made.items() if is_of_agent(entry)}
    return {name: (each, why) for name, each in said.items() if base_model(each["handle"]["model"]) not in served}


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
        else:
            yield [list(one) for _, one in groupby(said, key=lambda one: call_of(one.entry))]


def _author(message: BaseMessage, known: HandleEntry | None) -> str | None:
    """Who said a message that has an entry: whoever did, unless a plain node has said it again in other words."""
    if known is None:
        return None
    said = known.get("digest") in (None, digest_of(message))
    again = START_SOURCE if said else writer_of(message)
    return known["author"] if again == START_SOURCE else again


def _writer(message: BaseMessage, rules: ReaderRules, reader: str) -> str:
    """Who wrote a message that has no entry. What an agent of no node here said openly is input."""
    author, chart = writer_of(message), rules.guard.declared.chart
    source = source_of_author(author, reader)
    if source is None and rules.around:
        return author
    if persona_of(message) is None and _is_everybodys(source, rules):
        return START_SOURCE
    foreign = bool(chart.nodes) and not chart.inside(source or "")
    return START_SOURCE if foreign and persona_of(message) and not is_confidential(message) else author


def _is_everybodys(source: str | None, rules: ReaderRules) -> bool:
    """Tell whether what a function says is input: in a graph of LangGraph's own it is, unless it is declared."""
    is_known = rules.node or (source is None and rules.around)
    return not is_known and not {source, EVERYONE} & rules.sources.keys()
