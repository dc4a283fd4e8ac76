"""Appends messages to a view as its reader sees them: in their own encoding, or with their text encoded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, ToolMessage

from choreo_agents.chat import THOUGHT_BLOCKS, message_turn, thoughts_of, tools_called
from choreo_agents.engine import Prefill, Thinking
from choreo_agents.engine.calls import Content
from choreo_agents.engine.messages.message import thinker
from choreo_agents.errors import ForeignHandleError, VisibilityError
from choreo_agents.graph.audit.influence import RuntimeGuard
from choreo_agents.graph.signer import opening_of
from choreo_agents.graph.state import HandleEntry, handle_for, is_input, is_of_agent, length_for, model_of, with_handle
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.graph.view.entries import EncodedEntries
from choreo_agents.graph.view.placed_view import PlacedView, TurnMerger
from choreo_agents.graph.view.view import SeenEntry
from choreo_agents.graph.visibility import REENCODED, VisibilityMode, VisibilityRule
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, Kind, PromptText, instructions, question


class ViewEncoder:
    """Encodes and appends the messages of one call's view.

    Args:
        bound: The reader's engine.
        entries: The entries of all messages.
        turns: Adds the separators around messages.
        stands_for: Handles shown for merged messages, by the ids of the messages' own handles.
    """

    def __init__(
        self,
        bound: BoundEngine,
        entries: EncodedEntries,
        turns: TurnMerger,
        stands_for: Mapping[str, MessageHandle],
    ) -> None:
        self._bound, self._engine = bound, bound.engine
        self._reader, self._rules = entries.reader, entries.reader.rules
        self._entries, self._messages = entries, entries.by_id
        self._transformed: dict[str, BaseMessage] = {}
        self._turns, self._stands_for = turns, stands_for
        self.lasting: set[str] = set()
        """Ids of the appended handles that outlive the call: those in the graph's state, and imported modules."""

    @cached_property
    def _guards(self) -> list[RuntimeGuard]:
        """The checks of the call, made when all that it reads is encoded."""
        reader, entries = self._reader, self._entries.all
        guards = [g for g in (reader.rules.guard, *reader.rules.around) if g.hidden or any(g.forbidden.values())]
        return [RuntimeGuard(g, reader.engines, reader.place.author, entries) for g in guards]

    async def encode_foreign(self, items: Sequence[SeenEntry]) -> list[SeenEntry]:
        """Return the messages of the view, each with an encoding of the reader's model.

        Those that lack one are encoded behind the public root, once for all readers of that model, and so are those of
        the contexts in which text of the view is encoded. Lazy: it costs nothing until a request attends to it.

        Raises:
            ForeignHandleError: A message is not in the graph's state; or, with `strict`, its encoding was to be read.
        """
        model = self._bound.model
        for entry, rule in items if self._rules.strict else ():
            if is_of_agent(entry) and rule.mode.shares_kv and handle_for(entry, model) is None:
                raise self._refused(entry, "set its visibility to 'reencoded', or compile without strict=True")
        contexts = {self._reader.path_of(name) for _, rule in items for name in rule.contexts}
        named = [entry for path in contexts for entry in self._confidential_of(path)]
        read = [*(entry for entry, _ in items), *named]
        foreign = {entry["message_id"]: entry for entry in read if handle_for(entry, model) is None}
        calls: list[Prefill] = []
        for entry in foreign.values():
            if (message := self._messages.get(entry["message_id"])) is None:
                raise self._refused(entry, "its text is not in the graph's state: send the message itself, too")
            text, kind = message_turn(message, self._engine.chat, opening=opening_of(message))
            source = MessageHandle.model_validate(entry["handle"]) if is_of_agent(entry) else None
            extra: dict[str, Any] = {"author": entry["author"], "confidential": entry["confidential"], "source": source}
            calls.append(Prefill(text, await self._turns.behind_root(kind), **extra))
        handles = await self._bound.prefill_shared(calls)
        pairs = zip(foreign.items(), handles, strict=True)
        encoded = {name: with_handle(entry, handle) for (name, entry), handle in pairs}
        entries, served = self._entries, {engine.model.adapter.fingerprint for engine in self._reader.engines}
        for name, entry in encoded.items():
            if is_of_agent(entry) and model_of(entry["handle"]) not in served:
                entries.lost[name] = entry, "it was made by another model, which is not served here"
        entries.made = [*(entry for entry in entries.made if entry["message_id"] not in encoded), *encoded.values()]
        entries.all = [encoded.get(entry["message_id"], entry) for entry in entries.all]
        return [item._replace(entry=encoded.get(item.entry["message_id"], item.entry)) for item in items]

    def _refused(self, entry: HandleEntry, advice: str) -> ForeignHandleError:
        handle = MessageHandle.model_validate(entry["handle"])
        return ForeignHandleError(
            f"the message of {entry['author']!r} is handle {handle.id!r} of model {handle.base_model!r}, but "
            f"{self._reader.place.author!r} runs on {self._bound.model!r}: {advice}"
        )

    async def _encode_prompt(self, view: PlacedView, prompt: str, *, again: bool = False) -> MessageHandle:
        turn = question(prompt, self._engine.chat)
        await self._turns.prepare_for(view, turn.kind)
        call = self._own(turn.text, view, author=self._reader.system, role="user", recomputed=again)
        [handle] = await self._bound.aprefill([call])
        return handle

    async def append_prompt(self, view: PlacedView, text: str) -> MessageHandle:
        """Append the agent's prompt, or the summary of messages outside its history, as a user's turn."""
        handle = await self._encode_prompt(view, text)
        self._bound.copies.append(handle)
        view.add(handle)
        return handle

    def _own(self, words: Content, view: PlacedView, **options: Any) -> Prefill:
        """Return the prefill of a text for this reader alone, behind its view."""
        return Prefill(words, view.handles, view.offsets, view.end, adapter=self._reader.agent.adapter, **options)

    def length(self, item: SeenEntry) -> int:
        """Return the number of tokens that a message takes in the view, with the prompt before it."""
        entry, rule = item
        if rule.mode.encodes_again or not self._reader.has_said(entry):
            around = self._turns.length(self._kind(entry) if rule.mode.shares_kv else "part")
            if rule.mode.transform is None:
                return length_for(entry, self._bound.model) + around
            return len(self._transformed_tokens(entry, rule.mode, later=True, by_other=True)[0]) + around
        prompt, shown = entry.get("prompt"), self._own_message(entry)
        length = shown.length if isinstance(shown, MessageHandle) else len(self._engine.model.encode(shown))
        return length + (0 if prompt is None else int(prompt["length"]) + self._turns.length("part"))

    def allows(self, entry: HandleEntry, *, words_only: bool) -> bool:
        """Return whether the reader may attend to a message's own encoding.

        Raises:
            VisibilityError: A policy keeps also its text from the reader.
        """
        guards = () if self._reader.has_said(entry) else self._guards
        verdicts = [guard.allows(entry, words_only=words_only) for guard in guards]
        return all(verdicts)

    async def append(self, view: PlacedView, entry: HandleEntry, rule: VisibilityRule) -> None:
        """Append a message by the rule for its source."""
        handle = self._bound.handle(entry)
        own, reencode = self._reader.has_said(entry), rule.mode.encodes_again
        if not self.allows(entry, words_only=reencode) or reencode:
            shown = await self._reencode(view, entry, rule)
        else:
            prompt = entry.get("prompt")
            if own and prompt is not None:
                await self._append_prompt(view, prompt, entry.get("prompt_text"))
            content = self._own_message(entry) if own else handle
            if isinstance(content, MessageHandle):
                shown = await self._as_encoded(view, entry, content)
            else:
                shown = await self._reencode_thoughts(view, entry, content)
            if shown.id == handle.id:
                self.lasting.add(shown.id)
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
        return self._bound.grant(self._stands_for.get(handle.id, handle))

    def _is_lasting(self, view: PlacedView) -> bool:
        """Return whether all handles of a view outlive the call."""
        lasting = self.lasting.union(handle.id for handle in self._bound.shared)
        return all(parent.id in lasting for parent in view.handles)

    async def _reencode_thoughts(self, view: PlacedView, entry: HandleEntry, text: PromptText) -> MessageHandle:
        """Return one of the reader's own messages encoded again with its thoughts, from its text."""
        await self._turns.prepare_for(view, self._kind(entry))
        source, author = MessageHandle.model_validate(entry["handle"]), thinker(entry["author"])
        call = self._own(text, view, author=author, role="assistant", confidential=True, source=source)
        [encoded] = await self._bound.aprefill([call])
        self._bound.copies.append(encoded)
        return encoded

    def _is_first(self, view: PlacedView) -> bool:
        """Return whether the view is still empty but for the root."""
        is_plain = self._reader.agent.schema_prompt is None and not self._rules.shared_system
        return is_plain and len(view.handles) == len(self._turns.root.handles)

    async def _append_prompt(self, view: PlacedView, prompt: Mapping[str, Any], text: str | None) -> None:
        """Append the prompt of one of the reader's own messages; encode it again if its KV is gone."""
        handle = MessageHandle.model_validate(prompt)
        if self._bound.knows(handle):
            await self._turns.prepare_for(view, question("", self._engine.chat).kind)
            view.add(self._bound.grant(handle))
            self.lasting.add(handle.id)
        elif text is not None:
            lasts = self._is_lasting(view)
            encoded = await self._encode_prompt(view, text, again=True)
            if encoded.id != handle.id:
                # The same handle stays with the message anyway. Behind a lasting view the next call finds a new one.
                (self._bound.shared if lasts else self._bound.copies).append(encoded)
            view.add(encoded)

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
        for entry in self._confidential_of(path):
            tokens, kind = self._tokens_of(entry, REENCODED, later=True)
            await turns.prepare_for(view, kind)
            call = Prefill(tokens, view.handles, author=path, confidential=True, source=self._bound.handle(entry))
            [encoded] = await self._bound.prefill_shared([call])
            view.add(encoded)

    def _confidential_of(self, path: str) -> list[HandleEntry]:
        """Return a node's confidential messages by superstep."""
        confidential = [e for e in self._entries.all if e["author"] == path and e["confidential"]]
        return sorted(confidential, key=lambda entry: entry["superstep"])

    # The text of a message as the reader gets it

    def in_mode(self, entry: HandleEntry, mode: VisibilityMode) -> BaseMessage | None:
        """Return a message with the text that a mode makes of it; None if the state has only its handle."""
        name, message = entry["message_id"], self.in_state(entry)
        if message is None or mode.transform is None:
            return message
        if name not in self._transformed:
            # The transform gets text alone: tool calls are dropped, as their arguments could carry what it removes.
            is_answer = isinstance(message, AIMessage)
            calls: dict[str, Any] = {"tool_calls": [], "invalid_tool_calls": []} if is_answer else {}
            update = {"content": mode.apply(str(message.text)), **calls}
            self._transformed[name] = message.model_copy(update=update)
        return self._transformed[name]

    def in_state(self, entry: HandleEntry) -> BaseMessage | None:
        """Return a message with its own text; None if the state has only its handle."""
        return self._messages.get(entry["message_id"])

    def _kind(self, entry: HandleEntry) -> Kind:
        """Return the kind of turn that the message's encoding is in a view."""
        message, chat = self._messages.get(entry["message_id"]), self._engine.chat
        if chat.merges is not None and isinstance(message, ToolMessage):
            return message_turn(message, chat).kind
        if chat.merges is None or isinstance(message, AIMessage) or (message is None and "persona" in entry):
            return "turn"
        return instructions("", chat, later=True).kind if isinstance(message, SystemMessage) else "part"

    def instructs(self, entry: HandleEntry) -> bool:
        """Return whether a message is a system message."""
        return isinstance(self._messages.get(entry["message_id"]), SystemMessage)

    def _as_first(self, entry: HandleEntry) -> PromptText | None:
        """Return instructions as a template writes them at the start of a prompt; None if they were encoded that
        way."""
        engine = self._engine
        if not self.instructs(entry):
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
        engine, reworded = self._engine, self.in_mode(entry, mode)
        if reworded is None:
            raise VisibilityError(
                f"a message of {entry['author']!r} is to be transformed ({mode.name}), but only its handle was sent: "
                f"send message {entry['message_id']!r} itself, too, as choreo_agents.send does"
            )
        called, opening = tools_called(self._messages.values()), opening_of(reworded)
        text, kind = message_turn(reworded, engine.chat, later=later, quoted=by_other, called=called, opening=opening)
        return list(engine.model.encode(text)), kind

    def _own_message(self, entry: HandleEntry) -> MessageHandle | PromptText:
        """Return one of the reader's own earlier messages as its model's template renders it: with thoughts, which are
        encoded again where the decoded ones are lost or were edited, or without."""
        plain, message, chat = entry.get("thoughts"), self.in_state(entry), self._engine.chat
        thought = None if plain is None else MessageHandle.model_validate(plain)
        # Thoughts of another model are tokens of that model only: they are left out.
        if keeps_thoughts(chat, entry) and (thought is None or thought.base_model == self._bound.model):
            live = self._bound.if_alive(thought)
            text = None if message is None or live is not None else with_thinking(message, chat)
            if (content := live or text) is not None:
                return content
        return self._bound.handle(entry)


# Thoughts of agents before their answers. Other agents never see them


def with_thinking(message: BaseMessage, chat: ChatFormat) -> PromptText | None:
    """Return an agent's own earlier message with its thoughts, as its model's template renders both.

    None if it has no thoughts, or the template drops them.
    """
    thoughts = thoughts_of(message)
    if not thoughts or chat.thoughts is None or not chat.thoughts.kept:
        return None
    opening = opening_of(message)
    header = opening.get("header")
    thinking = Thinking.of(chat, (opening.get("speaker") or message.name) if header is None else None)
    lead = thinking.after if header is None else thinking.after + PromptText.special(str(header))
    blank = "" if lead.text == "" or lead.text[-1:].isspace() else " "
    return (
        chat.header(None, thinking=True)
        + PromptText.plain(thoughts)
        + PromptText.special(thinking.before + thinking.end)
        + lead
        + PromptText.plain(blank + str(message.text))
        + PromptText.special(chat.turn_end)
    )


def keeps_thoughts(chat: ChatFormat, entry: HandleEntry) -> bool:
    """Return whether a model's template renders the thoughts of an agent's own earlier message."""
    return chat.thoughts is not None and chat.thoughts.kept and "thoughts" in entry


def without_thoughts(message: BaseMessage) -> BaseMessage:
    """Return a message as other agents see it: without its thoughts."""
    blocks = message.content if isinstance(message.content, list) else []
    visible = [block for block in blocks if not (isinstance(block, dict) and block.get("type") in THOUGHT_BLOCKS)]
    if len(visible) == len(blocks):
        return message
    is_text = all(isinstance(block, str) or block.get("type") == "text" for block in visible)
    return message.model_copy(update={"content": str(message.text) if is_text else visible})
