"""One execution of an agent: find what is new, build its view, decode, say what it cost."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.runnables import RunnableConfig
from langgraph.config import get_stream_writer

from choreo_agents.engine import Engine, Prefill
from choreo_agents.errors import HandleError, VisibilityError
from choreo_agents.graph.inputs import digest_of, turn_of, with_ids, writer_of
from choreo_agents.graph.run import RunPlace
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.streaming import DecodeRun
from choreo_agents.graph.view import source_of_author, visible
from choreo_agents.graph.visibility import Rule, with_input
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.sampling import Sampling

_PUBLIC_ROOT = "public root"


class Speaker(Protocol):
    """What a turn needs of its agent."""

    name: str
    system: str | None
    header: str | None
    public: str | None
    sampling: Sampling
    rules: Mapping[str, Rule]


class Turn:
    """Lives for one call of the agent's node."""

    def __init__(self, agent: Speaker, engine: Engine, state: Any, config: RunnableConfig) -> None:
        self.started_s = time.perf_counter()
        self.agent = agent
        self.engine = engine
        self.config = config
        self.place = RunPlace.of(config, agent.name)
        self.rules = with_input(agent.rules)
        self.messages: list[BaseMessage] = with_ids(_channel(state, "messages"))
        self.entries = _still_said(_channel(state, "handles"), self.messages, state)
        self.superstep = 1 + max((entry["superstep"] for entry in self.entries), default=-1)
        self.asked: list[MessageHandle] = []
        """Prefills of this turn that others ask for too: one lease of each stays."""
        self.copies: list[MessageHandle] = []
        """Words that were encoded again for this turn alone."""

    async def speak(self) -> dict[str, Any]:
        """Decode one message and return the update of the graph's state."""
        try:
            root = await self._root()
            system, inputs = await self._prefill_turns(root)
            known = {entry["message_id"]: entry for entry in [*self.entries, *inputs]}
            superstep = 1 + max((entry["superstep"] for entry in known.values()), default=-1)
            view, seen = await self._view([*root, *system], list(known.values()))
            message, said = await self._decode(view, seen, superstep)
        finally:
            with suppress(HandleError):  # a scope may have ended meanwhile
                for handle in self.asked:
                    self.engine.release(handle, spare_only=True)
                for handle in self.copies:
                    self.engine.release(handle)
        entry = self._entry(said, self.place.author, superstep, self.place.branch, self.place.call, message)
        return {"handles": [*inputs, entry], "messages": [message]}

    async def _root(self) -> list[MessageHandle]:
        """The public root, encoded once for everybody; empty if the model has no begin-of-sequence token either."""
        text = self.engine.chat.root(self.agent.public)
        if not text:
            return []
        root = await self.engine.aprefill(text, author=_PUBLIC_ROOT, role="system")
        self.asked.append(root)
        return [root]

    async def _prefill_turns(self, root: list[MessageHandle]) -> tuple[list[MessageHandle], list[HandleEntry]]:
        """The agent's own system prompt, and entries for messages that no node has encoded as they now stand."""
        chat = self.engine.chat
        before = {entry["message_id"]: entry for entry in self.entries}
        new = [message for message in self.messages if not _encoded(message, before)]
        calls = []
        if self.agent.system is not None:
            turn = chat.turn("system", self.agent.system)
            calls.append(Prefill(turn, root, author=f"{self.place.author}.system", role="system"))
        authors = [before[m.id]["author"] if m.id in before else writer_of(m) for m in new]
        calls += [Prefill(turn_of(m, chat), root, author=author) for m, author in zip(new, authors, strict=True)]
        handles = await self.engine.aprefill(calls) if calls else []
        self.asked.extend(handles)
        own, rest = handles[: len(calls) - len(new)], handles[len(calls) - len(new) :]
        entries: list[HandleEntry] = []
        superstep = self.superstep
        for index, (message, author, handle) in enumerate(zip(new, authors, rest, strict=True)):
            entry = self._entry(handle, author, superstep, index, 0, message)
            edited = before.get(str(message.id))
            if edited is not None:
                entry |= {"superstep": edited["superstep"], "branch": edited["branch"], "call": edited.get("call", 0)}
            elif entries and author != entries[-1]["author"]:
                superstep = entry["superstep"] = superstep + 1  # what others said in between stays in between
            entries.append(entry)
        return own, entries

    async def _view(
        self, view: list[MessageHandle], entries: list[HandleEntry]
    ) -> tuple[list[MessageHandle], list[BaseMessage]]:
        """Append what the reader may see, and list it as messages; re-encoded words attend to the view before them."""
        mirrors = {message.id: message for message in self.messages}
        seen = []
        for entry, mode in visible(entries, self.place.author, self.rules):
            handle = MessageHandle.model_validate(entry["handle"])
            if mode == "reencoded":
                tokens = self.engine.tokens(handle)
                handle = await self.engine.aprefill(tokens, view, author=entry["author"])
                self.copies.append(handle)
            else:
                self._require_no_descent(handle, entry["author"], entries)
            view = [*view, handle]
            seen += [mirrors[entry["message_id"]]] if entry["message_id"] in mirrors else []
        return view, seen

    def _require_no_descent(self, handle: MessageHandle, author: str, entries: list[HandleEntry]) -> None:
        """A private source stays private through others: no shared encoding may have attended to its words.

        Neither to the source's own encoding, nor to a copy that was re-encoded for another reader.
        """
        hidden = {source for source, rule in self.rules.items() if rule.mode == "private"}
        if not hidden or self.engine.method != "choreo":
            return
        for ancestor, encoded_as in self.engine.ancestors(handle).items():
            # Equal words in an equal place are one message, whoever else said them too.
            said_by = [entry["author"] for entry in entries if entry["handle"]["id"] == ancestor.id]
            for name in said_by or [encoded_as or ""]:
                if (source := source_of_author(name, self.place.author)) in hidden:
                    raise VisibilityError(
                        f"{source!r} is declared private to {self.place.node!r}, but the encoding that {author!r} "
                        f"shares with it attended to it: declare {author!r} to {self.place.node!r} 'reencoded'"
                    )

    async def _decode(
        self, view: list[MessageHandle], seen: list[BaseMessage], superstep: int
    ) -> tuple[AIMessage, MessageHandle]:
        engine, place = self.engine, self.place
        message_id = self._message_id(superstep)
        run = await DecodeRun.start(self.config, engine.model.name, seen, message_id, place.node)
        header = engine.model.encode(self._header())
        stream = engine.astream(
            header,
            view,
            sampling=self._sampling(superstep),
            author=place.author,
            closing=engine.chat.turn_end,
            memo=place.call_name(),
        )
        handle, shown, first_token_s = None, "", None
        try:
            async with aclosing(stream):
                async for item in stream:
                    if isinstance(item, MessageHandle):
                        handle = item
                        continue
                    first_token_s = first_token_s or time.perf_counter()
                    if item.text:
                        shown += item.text
                        await run.token(item.text)
        except BaseException as error:
            await run.fail(error)
            raise
        assert handle is not None
        said = engine.model.decode(engine.tokens(handle)[len(header) :], special=False)
        if said.startswith(shown) and said != shown:
            await run.token(said.removeprefix(shown))  # a character that was never completed
        words = said.removesuffix(engine.chat.turn_end).strip()
        message = self._message(words, handle, message_id, sum(h.length for h in view), len(header))
        await run.end(message)
        self._report(handle, words, first_token_s or time.perf_counter())
        return message, handle

    def _header(self) -> str:
        chat, agent = self.engine.chat, self.agent
        return chat.header(agent.name) if agent.header is None else chat.assistant.opening(None) + agent.header

    def _sampling(self, superstep: int) -> Sampling:
        """The agent's, with a seed of this very call, or with the tokens that the run replays."""
        sampling, place = self.agent.sampling, self.place
        if place.replay is not None:
            forced = place.replay[place.author, superstep, place.branch, place.call]
            return sampling.model_copy(update={"forced": forced})
        if sampling.seed is None:
            return sampling.model_copy(update={"seed": place.call_seed(self.engine.seed, superstep)})
        return sampling

    def _message(self, words: str, handle: MessageHandle, message_id: str, seen: int, header: int) -> AIMessage:
        usage = self.engine.usage(handle)
        return AIMessage(
            content=words,
            name=self.place.node,
            id=message_id,
            response_metadata={"model_name": self.engine.model.name, "choreo": {"handle": handle.id}},
            usage_metadata=UsageMetadata(
                input_tokens=seen + header,
                output_tokens=handle.length - header,
                total_tokens=seen + handle.length,
                input_token_details=InputTokenDetails(cache_read=usage.tokens_reused),
            ),
        )

    def _report(self, handle: MessageHandle, words: str, first_token_s: float) -> None:
        """Tell `stream_mode="custom"` what this decode cost.

        Times count from the node's start: what it had to prefill before is part of them.
        """
        try:
            writer = get_stream_writer()
        except (RuntimeError, KeyError):
            return  # outside a graph, or inside a runnable that hides it, there is no stream
        usage = self.engine.usage(handle)
        writer(
            {
                "type": "choreo.decode",
                "agent": self.place.node,
                "handle": handle.id,
                "words": words,
                "tokens_encoded": usage.tokens_encoded,
                "tokens_reused": usage.tokens_reused,
                "ttft_s": first_token_s - self.started_s,
                "duration_s": time.perf_counter() - self.started_s,
            }
        )

    def _message_id(self, superstep: int) -> str:
        """The same again if LangGraph reruns the node; never shared by two branches or two calls."""
        place = self.place
        name = place.call_name() or str(uuid.uuid4())
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name} {superstep} {place.branch}"))

    def _entry(
        self, handle: MessageHandle, author: str, superstep: int, branch: int, call: int, message: BaseMessage
    ) -> HandleEntry:
        return HandleEntry(
            handle=handle.plain(),
            author=author,
            superstep=superstep,
            branch=branch,
            call=call,
            confidential=False,
            message_id=str(message.id),
            digest=digest_of(message),
        )


def _channel(state: Any, name: str) -> list[Any]:
    value = state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)
    return value or []


def _still_said(entries: list[HandleEntry], messages: list[BaseMessage], state: Any) -> list[HandleEntry]:
    """Entries whose message was not removed since. A `Send` may leave the channel out: then all of them stand."""
    if isinstance(state, Mapping) and "messages" not in state:
        return list(entries)
    present = {message.id for message in messages}
    return [entry for entry in entries if entry["message_id"] in present]


def _encoded(message: BaseMessage, entries: Mapping[str, HandleEntry]) -> bool:
    """Whether an entry stands for the message as it now reads."""
    entry = entries.get(str(message.id))
    return entry is not None and entry.get("digest") in (None, digest_of(message))
