"""A node that speaks: it sees its view of what was said, and adds one message."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from langgraph.config import get_stream_writer

from choreo_agents.engine import Engine, Prefill
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.graph.inputs import turn_of, with_ids
from choreo_agents.graph.run import RunPlace, run_coroutine
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.streaming import DecodeRun
from choreo_agents.graph.view import visible
from choreo_agents.graph.visibility import Reads, Rule, rules_of, with_input
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.sampling import Sampling

_PUBLIC_ROOT = "public root"


class Agent(Runnable[Any, dict[str, Any]]):
    """A LangGraph node that decodes one message over its view of the `handles` channel.

    In a `ChoreoGraph` edges say what it reads and `compile(engine=...)` gives it its engine. In a stock `StateGraph`
    over `ChoreoState` it takes both itself: `Agent("judge", engine=engine, reads={"pro": "shared"})`.

    Args:
        name: The speaker's name, in the header of its turns; also the node's name unless `add_node` gives another.
        system: Its private system prompt: part of its own views only.
        header: What its messages start with, after the chat template's assistant header; by default its name.
        sampling: How it chooses tokens. Without a seed, one is derived from the run's seed, the node, the superstep
            and the branch.
        engine: Needed in a stock `StateGraph` only.
        reads: Sources by name, in the order in which it sees those of one superstep: a mode, or a `Rule` with a mode
            and a history. Input text is shared with it unless declared otherwise.
        public: Public root, for a stock `StateGraph`: a system prompt that all agents share.
    """

    def __init__(
        self,
        name: str,
        *,
        system: str | None = None,
        header: str | None = None,
        sampling: Sampling | None = None,
        engine: Engine | None = None,
        reads: Reads | None = None,
        public: str | None = None,
    ) -> None:
        self.name: str = name
        self.system = system
        self.header = header
        self.sampling = sampling or Sampling()
        self.engine = engine
        self.rules: Mapping[str, Rule] = rules_of(reads or {})
        self.public = public

    def bound(self, engine: Engine | None, rules: Mapping[str, Rule], public: str | None) -> Agent:
        """A copy that reads by these rules; its own engine, if it has one, stays."""
        agent = copy.copy(self)
        agent.engine = self.engine or engine
        agent.rules = rules
        agent.public = public
        return agent

    def invoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> dict[str, Any]:
        """Speak once. Takes graph state, returns its update."""
        return run_coroutine(self.ainvoke(input, config))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> dict[str, Any]:
        """Speak once. Takes graph state, returns its update."""
        if self.engine is None:
            raise InvalidRequestError(
                f"agent {self.name!r} has no engine: compile the ChoreoGraph with engine=..., or give the agent one"
            )
        return await _Turn(self, self.engine, input, ensure_config(config)).speak()


class _Turn:
    """One execution of an agent."""

    def __init__(self, agent: Agent, engine: Engine, state: Any, config: RunnableConfig) -> None:
        self.started_s = time.perf_counter()
        self.agent = agent
        self.engine = engine
        self.config = config
        self.place = RunPlace.of(config, agent.name)
        self.rules = with_input(agent.rules)
        self.entries: list[HandleEntry] = list(_channel(state, "handles"))
        self.messages: list[BaseMessage] = with_ids(_channel(state, "messages"))

    async def speak(self) -> dict[str, Any]:
        root = await self._root()
        system, inputs = await self._prefill_turns(root)
        superstep = 1 + max((entry["superstep"] for entry in [*self.entries, *inputs]), default=-1)
        view = await self._view([*root, *system], [*self.entries, *inputs])
        message, handle = await self._decode(view, superstep)
        assert message.id is not None
        entry = self._entry(handle, self.place.node, superstep, self.place.branch, message.id)
        return {"handles": [*inputs, entry], "messages": [message]}

    async def _root(self) -> list[MessageHandle]:
        """The public root, encoded once for everybody; empty if the model has no begin-of-sequence token either."""
        text = self.engine.chat.root(self.agent.public)
        return [await self.engine.aprefill(text, author=_PUBLIC_ROOT, role="system")] if text else []

    async def _prefill_turns(self, root: list[MessageHandle]) -> tuple[list[MessageHandle], list[HandleEntry]]:
        """The agent's own system prompt, and entries for messages that no node has encoded yet."""
        mirrored = {entry["message_id"] for entry in self.entries}
        new = [message for message in self.messages if message.id not in mirrored]
        calls = []
        if self.agent.system is not None:
            turn = self.engine.chat.turn("system", self.agent.system)
            calls.append(Prefill(turn, root, author=f"{self.place.node}.system", role="system"))
        sources = [turn_of(message, self.engine.chat) for message in new]
        calls += [Prefill(turn, root, author=author) for author, turn in sources]
        handles = await self.engine.aprefill(calls) if calls else []
        own = handles[: len(calls) - len(new)]
        superstep = 1 + max((entry["superstep"] for entry in self.entries), default=-1)
        entries = []
        for message, (author, _), handle in zip(new, sources, handles[len(own) :], strict=True):
            entries.append(self._entry(handle, author, superstep, 0, str(message.id)))
        return own, entries

    async def _view(self, view: list[MessageHandle], entries: list[HandleEntry]) -> list[MessageHandle]:
        """Append what the reader may see; re-encoded words attend to the view before them."""
        for entry, mode in visible(entries, self.place.node, self.rules):
            handle = MessageHandle.model_validate(entry["handle"])
            if mode == "reencoded":
                tokens = self.engine.tokens(handle)
                handle = await self.engine.aprefill(tokens, view, author=entry["author"])
            else:
                self._require_no_descent(handle, entry["author"], entries)
            view = [*view, handle]
        return view

    def _require_no_descent(self, handle: MessageHandle, author: str, entries: list[HandleEntry]) -> None:
        """A private source stays private through others: no shared encoding may have attended to its words.

        Neither to the source's own encoding, nor to a copy that was re-encoded for another reader.
        """
        hidden = {source for source, rule in self.rules.items() if rule.mode == "private"}
        if not hidden or self.engine.method != "choreo":
            return
        authors = {entry["handle"]["id"]: entry["author"] for entry in entries}
        for ancestor, encoded_as in self.engine.ancestors(handle).items():
            source = authors.get(ancestor.id, encoded_as)
            if source in hidden:
                raise VisibilityError(
                    f"{source!r} is declared private to {self.place.node!r}, but the encoding that {author!r} shares "
                    f"with it attended to it: declare {author!r} to {self.place.node!r} 'reencoded'"
                )

    async def _decode(self, view: list[MessageHandle], superstep: int) -> tuple[AIMessage, MessageHandle]:
        engine = self.engine
        sampling = self._sampling(superstep)
        message_id = self._message_id(superstep)
        run = await DecodeRun.start(self.config, engine.model.name, self.messages, message_id, self.place.node)
        header = engine.model.encode(self._header())
        stream = engine.astream(
            header,
            view,
            sampling=sampling,
            author=self.place.node,
            closing=engine.chat.turn_end,
            memo=self.place.call_name(0),
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
            forced = place.replay[place.node, superstep, place.branch]
            return sampling.model_copy(update={"forced": forced})
        if sampling.seed is None:
            return sampling.model_copy(update={"seed": place.call_seed(self.engine.seed, superstep, 0)})
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
        """Tell `stream_mode="custom"` what this decode cost. Times count from the node's start: what it had to
        prefill before is part of them."""
        try:
            writer = get_stream_writer()
        except RuntimeError:
            return  # outside a graph there is no stream
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
        """The same again if LangGraph reruns the node; never shared by two branches."""
        place = self.place.call_name(0) or str(uuid.uuid4())
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{place} {self.place.node} {superstep} {self.place.branch}"))

    def _entry(self, handle: MessageHandle, author: str, superstep: int, branch: int, message_id: str) -> HandleEntry:
        return HandleEntry(
            handle=handle.plain(),
            author=author,
            superstep=superstep,
            branch=branch,
            confidential=False,
            message_id=message_id,
        )


def _channel(state: Any, name: str) -> list[Any]:
    value = state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)
    return value or []
