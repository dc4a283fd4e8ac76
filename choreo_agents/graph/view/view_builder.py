"""Builds one reader's view: places the visible messages, and encodes text again where the rules say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig

from choreo_agents.chat import THOUGHT_BLOCKS, Described, message_turn, own_turns
from choreo_agents.engine import Prefill
from choreo_agents.engine.calls import Content
from choreo_agents.engine.transfer import Leases
from choreo_agents.errors import ContextLengthError, VisibilityError
from choreo_agents.graph.answers import NO_REFERENCE, UNPROVEN, encoding_of
from choreo_agents.graph.audit.influence import RuntimeGuard
from choreo_agents.graph.prompts import called, text_of
from choreo_agents.graph.signer import opening_of
from choreo_agents.graph.state import HandleEntry, handle_for, is_input, length_for
from choreo_agents.graph.view.entries import EncodedEntries
from choreo_agents.graph.view.imported_prompt import imported_by
from choreo_agents.graph.view.merged_branches import MergedBranches
from choreo_agents.graph.view.placed_view import PlacedView
from choreo_agents.graph.view.view import SeenEntry, seen, siblings
from choreo_agents.graph.visibility import REENCODED, START_SOURCE, VisibilityMode, VisibilityRule, source_of_author
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import Kind, PromptText, instructions, question

MASK = "[confidential]"
"""Replacement for confidential text in traces."""
_NO_TOOL: Mapping[str, Any] = {"type": "function", "function": {"name": MASK}}


class ViewBuilder:
    """Builder of the view of one call of one node. Lives as long as the call.

    Args:
        encoded: The entries of the messages in the graph's state, and their reader.
    """

    def __init__(self, encoded: EncodedEntries) -> None:
        self._encoded, self._reader, self._rules = encoded, encoded.reader, encoded.reader.rules
        self._engine, self._agent = self._reader.engines[0], self._reader.agent
        self._bound, self._turns, self._messages = encoded.bound, encoded.turns, encoded.by_id
        self._is_parallel = self._rules.positions == "parallel" and self._engine.method == "choreo"
        """True if sibling messages start at one position."""
        self.attends_to_answers = False
        """True if the view has the encoding of a chat model's answer, which may have attended to anything its function
        reads."""
        self.words_of: dict[str, str] = {}
        """Authors of whom only text is read where KV should be, and the reason."""
        self.summary: str | None = None
        """Text in place of the messages outside the reader's history."""
        self._imported = imported_by(self._agent, self._engine)
        self._modules: Leases | None = None
        self._branches = MergedBranches(self._bound, self._reader)
        self._transformed: dict[str, BaseMessage] = {}
        self._lasting: set[str] = set()
        """Ids of the appended handles that outlive the call: those in the graph's state, and imported modules."""
        self._shows_all = self._reader.place.trace_confidential
        guarded = {context.name for context in self._rules.guard.chart.guarded}
        self._is_private = self._agent.confidential or self._reader.system.rpartition("|")[2] in guarded
        tools = self._agent.tools
        self.rendered: list[BaseMessage] = []
        """The view as chat messages, for callbacks and traces. Confidential text is masked unless the run shows it
        (`RunOptions.trace_confidential`): messages, system prompts and prompts of confidential agents, confidential
        modules, and the private contexts that the graph's policy names."""
        self.rendered_tools: Described = (_NO_TOOL,) * len(tools) if self._is_private and not self._shows_all else tools
        """The tools that the reader may call, as chat models describe them: beside the messages."""

    async def view(self, system: str | None, state: Any, config: RunnableConfig) -> PlacedView:
        """Encode the messages that have no encoding yet, and assemble all that the reader may see.

        Args:
            system: The agent's own system prompt.
            state: State of the graph, for the function that makes a text in place of messages outside the history.
            config: Config of the node, for the same.
        """
        limit, encoded = self._agent.history, self._encoded
        view, is_instructed = await self._instructions(system)
        await encoded.encode_new()
        items, text_only = seen(self._reader, encoded.all, encoded.calls)
        shown, dropped = await encoded.encode_foreign(items), list[SeenEntry]()
        if limit is not None:
            shown, dropped = limit.split(shown, self._length, lambda item: self._instructs(item.entry), encoded.calls)
        self._note_words_of(shown, text_only)
        if not is_instructed and not (shown and self._instructs(shown[0].entry)):
            for handle in await self._turns.default_instructions():
                view.add(handle)
        if dropped and limit is not None and limit.summary is not None:
            text = await called(limit.summary, [self._dropped_messages(dropped), state], config)
            self.summary = text_of(self._agent.name, "prompt", text)
            if self.summary is not None:
                await self._ask(view, self.summary)
                is_confidential = self._is_private or any(entry["confidential"] for entry, _ in dropped)
                self._render(HumanMessage(self.summary), confidential=is_confidential)
        await self._branches.prepare(shown)
        for group in siblings(shown, parallel=self._is_parallel):
            first, items = len(view.handles), list(chain(*group))
            await self._append_group(view, group)
            ends = any(is_input(entry) or self._reader.has_said(entry) for entry, _ in items)
            self._branches.record(view, first, items, ends=ends)
            for entry, rule in items:
                self._render_entry(entry, rule)
        await self._branches.append_boundaries(view)
        return view

    async def ask(self, view: PlacedView, prompt: str | None) -> MessageHandle | None:
        """Append the agent's prompt, if it has one, as a user's turn, and close the turn."""
        handle = None
        if prompt is not None:
            self._render(HumanMessage(prompt), confidential=self._is_private)
            handle = await self._ask(view, prompt)
        await self._turns.close(view)
        return handle

    def release(self) -> None:
        """Release what was encoded for this call alone, and all but one lease of what is shared."""
        self._bound.release()
        if self._modules is not None:
            self._modules.release()

    def outgrown(self, error: ContextLengthError) -> ContextLengthError:
        """Return the error with the source whose messages take most of the view, and advice to make them fewer."""
        tokens: Counter[str] = Counter()
        author = self._reader.place.author
        reader = author.rsplit("|", maxsplit=1)[-1]
        for entry, _ in seen(self._reader, self._encoded.all, self._encoded.calls)[0]:
            own = self._reader.has_said(entry)
            source = reader if own else source_of_author(entry["author"], author) or entry["author"]
            tokens[source] += length_for(entry, self._bound.model)
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

    # What stands before the messages

    async def _instructions(self, system: str | None) -> tuple[PlacedView, bool]:
        """Return the view before all messages, and whether it instructs the reader: the root, imported modules, and its
        own system prompt with its tools."""
        public, imported, adapter = self._rules.shared_system, self._imported, self._agent.adapter
        await self._turns.begin(public)
        if public:
            self._render(SystemMessage(public))
        if system is not None:
            self._render(SystemMessage(system), confidential=self._is_private)
        view = self._turns.root.copy()
        if imported is not None:
            for text, part in imported.parts:
                kind = {"user": HumanMessage, "assistant": AIMessage}.get(part.role or "system", SystemMessage)
                is_secret = part.confidential or (part.kind != "module" and self._is_private)
                self._render(kind(text), confidential=is_secret)
            # A schema brings the template's start of a conversation: an empty root would repeat it.
            view = PlacedView()
            for handle in () if public is None else await self._turns.whole_root(public):
                view.add(handle)
            self._modules = await imported.lease()
            modules = [self._bound.grant(handle) for handle in self._modules.handles]
            self._lasting |= {handle.id for handle in modules}
            await imported.place(view, modules, self._reader.system, self._bound, adapter)
        is_later = bool(public) or imported is not None
        own = own_turns(system, self._agent.tools, self._engine.chat, later=is_later)
        await self._turns.append_turns(view, own, self._reader.system, adapter)
        return view, is_later or bool(own)

    # Messages, each by the rule for its source

    async def _append_group(self, view: PlacedView, group: Sequence[Sequence[SeenEntry]]) -> None:
        """Append a group of sibling messages: each starts at the view's end, or, if merged, where its branch left the
        view."""
        if len(group) > 1:
            # Each sibling brings its own separators, so that nothing depends on their order.
            await self._turns.close(view)
        before = view.copy()
        for items in group:
            so_far, first = before.copy(), self._bound.handle(items[0].entry)
            if self._is_parallel and first.id in self._branches.stands_for:
                # A branch that read a re-encoded copy of the input still stands behind the input.
                attended = {parent.id for parent in self._engine.inspect.ancestors(first)}
                listed = [handle_for(entry, self._bound.model) for entry in self._encoded.all if is_input(entry)]
                inputs = {handle.id for handle in listed if handle is not None}
                descents = self._engine.inspect.descent([first], ())
                attended |= {source for parent in attended for source in descents[parent].sources if source in inputs}
                so_far.end = before.end_of(attended)
            shown = len(so_far.handles)
            for entry, rule in items:
                await self._append(so_far, entry, rule)
            if len(group) > 1:
                await self._turns.close(so_far)
            view.extend(so_far, shown)

    async def _append(self, view: PlacedView, entry: HandleEntry, rule: VisibilityRule) -> None:
        handle = self._bound.handle(entry)
        reencode = rule.mode.encodes_again
        if not self._allows(entry, words_only=reencode) or reencode:
            shown = await self._reencode(view, entry, rule)
        else:
            if self._reader.has_said(entry) and (prompt := entry.get("prompt")) is not None:
                await self._append_prompt(view, prompt, entry.get("prompt_text"))
            shown = await self._as_encoded(view, entry, self._thought(entry) or handle)
            if shown.id == handle.id:
                self._lasting.add(shown.id)
        view.add(shown, stands_for=handle)

    async def _as_encoded(self, view: PlacedView, entry: HandleEntry, handle: MessageHandle) -> MessageHandle:
        """Return the message's own encoding, or the one that stands for it."""
        if self._is_first(view) and (text := self._as_first(entry)) is not None:
            kind = instructions("", self._engine.chat, later=False).kind
            await self._turns.prepare_for(view, kind)
            call = Prefill(text, [*view.handles], author=entry["author"], source=handle)
            [encoded] = await self._bound.prefill_shared([call])
            return encoded
        await self._turns.prepare_for(view, self._kind(entry))
        return self._bound.grant(self._branches.stands_for.get(handle.id, handle))

    def _thought(self, entry: HandleEntry) -> MessageHandle | None:
        """Return one of the reader's own messages as it was decoded, with its thoughts, if the chat template shows
        these; None also if they are lost, were edited, or are another model's."""
        plain, thoughts = entry.get("thoughts"), self._engine.chat.thoughts
        if plain is None or thoughts is None or not thoughts.kept or not self._reader.has_said(entry):
            return None
        thought = MessageHandle.model_validate(plain)
        return self._bound.if_alive(thought) if thought.base_model == self._bound.model else None

    async def _reencode(self, view: PlacedView, entry: HandleEntry, rule: VisibilityRule) -> MessageHandle:
        """Return a fresh encoding of a message's text, transformed by the rule's mode and in its scope."""
        handle, is_readers = self._bound.handle(entry), rule.scope == "reader"
        author, confidential = entry["author"], entry["confidential"]
        scope = view if is_readers else self._turns.root.copy()
        for name in rule.contexts:
            await self._append_context(name, scope)
        later = not (self._is_first(view) and self._is_first(scope))
        words, kind = self._tokens_of(entry, rule.mode, later=later)
        await self._turns.prepare_for(scope, kind)
        if not is_readers:
            await self._turns.prepare_for(view, kind)
            copy = Prefill(words, scope.handles, author=author, confidential=confidential, source=handle)
            [encoded] = await self._bound.prefill_shared([copy])
            return encoded
        copy = self._own(words, view, author=author, confidential=confidential, source=handle)
        [encoded] = await self._bound.aprefill([copy])
        # Input right behind the agent's own system prompt is found again by its next call. And a copy that equals the
        # message's own encoding is what the graph's state keeps.
        lasts = encoded.id == handle.id or (is_input(entry) and self._is_lasting(view))
        (self._bound.shared if lasts else self._bound.copies).append(encoded)
        return encoded

    async def _append_context(self, name: str, view: PlacedView) -> None:
        """Append the texts of a private context, behind which a message is encoded again.

        Args:
            name: The context's name in its graph.
            view: The root and the contexts appended before.
        """
        path, rules, turns = self._reader.path_of(name), self._rules, self._turns
        for text in rules.systems.get(name, ()):
            is_first = rules.shared_system is None and len(view.handles) == len(turns.root.handles)
            await turns.append_turns(view, [instructions(text, turns.chat, later=not is_first)], path, None)
        if name not in rules.systems and name not in rules.confidential:
            raise VisibilityError(f"there is no private context {name!r} in which to encode text")
        for entry in self._encoded.confidential_of(path):
            tokens, kind = self._tokens_of(entry, REENCODED, later=True)
            await turns.prepare_for(view, kind)
            call = Prefill(tokens, view.handles, author=path, confidential=True, source=self._bound.handle(entry))
            [encoded] = await self._bound.prefill_shared([call])
            view.add(encoded)

    async def _append_prompt(self, view: PlacedView, prompt: Mapping[str, Any], text: str | None) -> None:
        """Append the prompt of one of the reader's own messages; encode it again if its KV is gone."""
        handle = MessageHandle.model_validate(prompt)
        if self._bound.knows(handle):
            await self._turns.prepare_for(view, question("", self._engine.chat).kind)
            view.add(self._bound.grant(handle))
            self._lasting.add(handle.id)
        elif text is not None:
            lasts = self._is_lasting(view)
            encoded = await self._encode_prompt(view, text, again=True)
            if encoded.id != handle.id:
                # The same handle stays with the message anyway. Behind a lasting view the next call finds a new one.
                (self._bound.shared if lasts else self._bound.copies).append(encoded)
            view.add(encoded)

    async def _ask(self, view: PlacedView, text: str) -> MessageHandle:
        """Append the agent's prompt, or the summary of messages outside its history, as a user's turn."""
        handle = await self._encode_prompt(view, text)
        self._bound.copies.append(handle)
        view.add(handle)
        return handle

    async def _encode_prompt(self, view: PlacedView, prompt: str, *, again: bool = False) -> MessageHandle:
        turn = question(prompt, self._engine.chat)
        await self._turns.prepare_for(view, turn.kind)
        call = self._own(turn.text, view, author=self._reader.system, role="user", recomputed=again)
        [handle] = await self._bound.aprefill([call])
        return handle

    def _own(self, words: Content, view: PlacedView, **options: Any) -> Prefill:
        """Return the prefill of a text for this reader alone, behind its view."""
        return Prefill(words, view.handles, view.offsets, view.end, adapter=self._agent.adapter, **options)

    def _is_lasting(self, view: PlacedView) -> bool:
        """Return whether all handles of a view outlive the call."""
        lasting = self._lasting.union(handle.id for handle in self._bound.shared)
        return all(parent.id in lasting for parent in view.handles)

    def _is_first(self, view: PlacedView) -> bool:
        """Return whether the view is still empty but for the root."""
        is_plain = self._agent.schema_prompt is None and not self._rules.shared_system
        return is_plain and len(view.handles) == len(self._turns.root.handles)

    def _length(self, item: SeenEntry) -> int:
        """Return the number of tokens that a message takes in the view, with the prompt before it."""
        entry, rule = item
        if rule.mode.encodes_again or not self._reader.has_said(entry):
            around = self._turns.length(self._kind(entry) if rule.mode.shares_kv else "part")
            if rule.mode.transform is None:
                return length_for(entry, self._bound.model) + around
            return len(self._transformed_tokens(entry, rule.mode, later=True, by_other=True)[0]) + around
        prompt, shown = entry.get("prompt"), self._thought(entry) or self._bound.handle(entry)
        return shown.length + (0 if prompt is None else int(prompt["length"]) + self._turns.length("part"))

    # Who may attend to what

    @cached_property
    def _guards(self) -> list[RuntimeGuard]:
        """The checks of the call, made when all that it reads is encoded."""
        reader, entries = self._reader, self._encoded.all
        guards = [g for g in (reader.rules.guard, *reader.rules.around) if g.hidden or any(g.forbidden.values())]
        return [RuntimeGuard(g, reader.engines, reader.place.author, entries) for g in guards]

    def _allows(self, entry: HandleEntry, *, words_only: bool) -> bool:
        """Return whether the reader may attend to a message's own encoding.

        Raises:
            VisibilityError: A policy keeps also its text from the reader.
        """
        guards = () if self._reader.has_said(entry) else self._guards
        verdicts = [guard.allows(entry, words_only=words_only) for guard in guards]
        return all(verdicts)

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
            message = self._messages.get(entry["message_id"])
            if message is not None and not (is_input(entry) and (self._rules.node or message.type != "ai")):
                claimed = entry.get("unverified_author")
                why = UNPROVEN if claimed else encoding_of(message, self._reader.engines)
                author = claimed["author"] if claimed else entry["author"]
                said_by = "its input" if author == START_SOURCE else author
                self.words_of[said_by] = why if isinstance(why, str) else NO_REFERENCE

    # The text of a message as the reader gets it

    def _in_mode(self, entry: HandleEntry, mode: VisibilityMode) -> BaseMessage | None:
        """Return a message with the text that a mode makes of it; None if the state has only its handle."""
        name = entry["message_id"]
        message = self._messages.get(name)
        if message is None or mode.transform is None:
            return message
        if name not in self._transformed:
            # The transform gets text alone: tool calls are dropped, as their arguments could carry what it removes.
            is_answer = isinstance(message, AIMessage)
            calls: dict[str, Any] = {"tool_calls": [], "invalid_tool_calls": []} if is_answer else {}
            update = {"content": mode.apply(str(message.text)), **calls}
            self._transformed[name] = message.model_copy(update=update)
        return self._transformed[name]

    def _kind(self, entry: HandleEntry) -> Kind:
        """Return the kind of turn that the message's encoding is in a view."""
        message, chat = self._messages.get(entry["message_id"]), self._engine.chat
        if chat.merges is not None and isinstance(message, ToolMessage):
            return message_turn(message, chat).kind
        if chat.merges is None or isinstance(message, AIMessage) or (message is None and "persona" in entry):
            return "turn"
        return instructions("", chat, later=True).kind if isinstance(message, SystemMessage) else "part"

    def _instructs(self, entry: HandleEntry) -> bool:
        """Return whether a message is a system message."""
        return isinstance(self._messages.get(entry["message_id"]), SystemMessage)

    def _as_first(self, entry: HandleEntry) -> PromptText | None:
        """Return instructions as a template writes them at the start of a prompt; None if they were encoded that
        way."""
        engine = self._engine
        if not self._instructs(entry):
            return None
        text = message_turn(self._messages[entry["message_id"]], engine.chat, later=False).text
        return None if engine.model.encode(text) == self._bound.words(entry) else text

    def _tokens_of(self, entry: HandleEntry, mode: VisibilityMode, *, later: bool) -> tuple[list[int], Kind]:
        """Return the tokens to encode again, and their kind: the message's own, or those of the text that the mode
        makes of it.

        Where users and model take turns, another agent's message becomes a part of a user's turn.

        Args:
            entry: The message.
            mode: The mode in which the reader sees it.
            later: True if anything stands before it.

        Raises:
            VisibilityError: The mode transforms text, and the reader was sent the handle without its message.
        """
        by_other, engine = not self._reader.has_said(entry) and not is_input(entry), self._engine
        if mode.transform is not None:
            return self._transformed_tokens(entry, mode, later=later, by_other=by_other)
        tokens, message, kind = self._bound.words(entry), self._messages.get(entry["message_id"]), self._kind(entry)
        if not later and (text := self._as_first(entry)) is not None:
            return list(engine.model.encode(text)), instructions("", engine.chat, later=False).kind
        if engine.chat.merges is None or kind != "turn" or not by_other:
            return tokens, kind
        if isinstance(message, AIMessage):
            text, kind = message_turn(message, engine.chat, quoted=True, opening=opening_of(message))
            return list(engine.model.encode(text)), kind
        # The state has an answer's handle without its message: its text is read off its tokens.
        return (engine.model.encode(engine.model.as_user_part(tokens)), "part") if message is None else (tokens, kind)

    def _transformed_tokens(
        self, entry: HandleEntry, mode: VisibilityMode, *, later: bool, by_other: bool
    ) -> tuple[list[int], Kind]:
        engine, reworded = self._engine, self._in_mode(entry, mode)
        if reworded is None:
            raise VisibilityError(
                f"a message of {entry['author']!r} is to be transformed ({mode.name}), but only its handle was sent: "
                f"send message {entry['message_id']!r} itself, too, as choreo_agents.send does"
            )
        options: Any = {"called": self._encoded.called, "opening": opening_of(reworded)}
        text, kind = message_turn(reworded, engine.chat, later=later, quoted=by_other, **options)
        return list(engine.model.encode(text)), kind

    def _dropped_messages(self, dropped: Sequence[SeenEntry]) -> list[BaseMessage]:
        """Return messages outside the reader's history, with no more text than its view would have had."""
        for entry, _ in dropped:
            self._allows(entry, words_only=True)
        messages = [(entry, self._in_mode(entry, rule.mode)) for entry, rule in dropped]
        return [self._as_seen(entry, words) for entry, words in messages if words is not None]

    def _as_seen(self, entry: HandleEntry, words: BaseMessage) -> BaseMessage:
        """Return a message without its thoughts, unless the view has them."""
        if (shorter := self._branches.summaries.get(self._bound.handle(entry).id)) is not None:
            return words.model_copy(update={"content": shorter})
        return words if self._thought(entry) else without_thoughts(words)

    # The view as chat messages

    def _render_entry(self, entry: HandleEntry, rule: VisibilityRule) -> None:
        """Add a message, and before it the prompt of its author if that is in the view."""
        if (words := self._in_mode(entry, rule.mode)) is None:
            return
        confidential, prompt = bool(entry["confidential"]), entry.get("prompt_text")
        if prompt is not None and self._reader.has_said(entry):
            self._render(HumanMessage(prompt), confidential=confidential or self._is_private)
        self._render(self._as_seen(entry, words), confidential=confidential)

    def _render(self, message: BaseMessage, *, confidential: bool = False) -> None:
        self.rendered.append(_masked(message) if confidential and not self._shows_all else message)


def _masked(message: BaseMessage) -> BaseMessage:
    """Return a message with author and type only. It is made anew, since text may stand in any field of a message."""
    named = {"id": message.id, "name": message.name}
    if isinstance(message, ToolMessage):
        return ToolMessage(MASK, tool_call_id=message.tool_call_id, **named)
    kinds = (AIMessage, SystemMessage)
    kind = next((kind for kind in kinds if isinstance(message, kind)), HumanMessage)
    return kind(MASK, **named)


def without_thoughts(message: BaseMessage) -> BaseMessage:
    """Return a message as other agents see it: without its thoughts."""
    blocks = message.content if isinstance(message.content, list) else []
    visible = [block for block in blocks if not (isinstance(block, dict) and block.get("type") in THOUGHT_BLOCKS)]
    if len(visible) == len(blocks):
        return message
    is_text = all(isinstance(block, str) or block.get("type") == "text" for block in visible)
    return message.model_copy(update={"content": str(message.text) if is_text else visible})
