"""One execution of an agent: find what is new, build its view, decode, say what it cost."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple, cast

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs
from langgraph.graph.message import add_messages
from langgraph.types import Command

from choreo_agents.chat import OutputStream, required_tools
from choreo_agents.engine import Engine, PlayedCall
from choreo_agents.errors import ConstraintError, ContextLengthError, HandleError, InvalidRequestError
from choreo_agents.graph.answers import answers_in, tell_words_of
from choreo_agents.graph.durable.thread_log import RunLineage
from choreo_agents.graph.keeping import named_in, speaking
from choreo_agents.graph.langgraph_internals import superstep_of
from choreo_agents.graph.outputs import sampling_of, written
from choreo_agents.graph.provenance import ProvenState, handed_on, sign
from choreo_agents.graph.run_context import CallRequest, CallResult, RunContext
from choreo_agents.graph.sending import sent_at
from choreo_agents.graph.signer import Change, rewritten
from choreo_agents.graph.state import HandleEntry, merge_entries
from choreo_agents.graph.turn.streaming import DecodeRun, decode_run, report, tell_reencoded
from choreo_agents.graph.view.call_id import CallId
from choreo_agents.graph.view.placed_view import PlacedView
from choreo_agents.graph.view.reader_rules import CallReader, Speaker, placed_rules
from choreo_agents.graph.view.view import Summary
from choreo_agents.graph.view.view_builder import ViewBuilder
from choreo_agents.graph.words.entries import entry_of, without_removed
from choreo_agents.graph.words.prompts import called, text_of, words_of
from choreo_agents.graph.words.thoughts import header_of, opening_noted, thinking_of
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import PromptText
from choreo_agents.sampling import BLANK_LINES, Sampling

Choices = Sequence[str] | Callable[[Any], Sequence[str]]
"""The answers that an agent may give: always the same, or made of the graph's state."""


class _EncodedPrompt(NamedTuple):
    """What one call has said, and where in the run it stands."""

    place: CallId
    message: AIMessage
    handle: MessageHandle
    thought: MessageHandle | None
    """What it has decoded: thoughts and answer; None: it answered at once."""


class AgentTurn:
    """Lives for one call of the agent's node.

    Args:
        agent: Who speaks.
        engine: Encodes and decodes.
        state: The graph's.
        config: The node's.
    """

    def __init__(self, agent: Speaker, engine: Engine, state: Any, config: RunnableConfig) -> None:
        self.started_s = time.perf_counter()
        self.agent = agent
        self.engine = engine
        self.state = state
        self.config = config
        rules = agent.reader_rules()
        self.place = CallId.of(config, agent.name, state, node=rules.node)
        rules = placed_rules(rules, config, self.place.author)
        home = self.place.author.rpartition("|")[0]
        self.persona = f"{home}|{agent.persona}" if home and agent.persona else agent.persona or self.place.author
        proven = ProvenState(state, config, engine.lineage.seals)
        self.signer = proven.signer
        others = tuple(RunContext.of(config).engines.values())
        reader = CallReader(self.place, self.persona, rules, agent, others)
        entries = without_removed(proven.entries, proven.messages, state)
        earliest = max(proven.superstep, sent_at(state))
        self.answers = answers_in(proven.messages)
        self.reading = ViewBuilder(engine, reader, proven.messages, entries, earliest)
        self.lineage: RunLineage | None = None

    async def speak(self) -> dict[str, Any]:
        """Decode one message, or as many as the agent says at a time, and return the update of the graph's state."""
        async with speaking(self.engine, self.config, self.reading.entries, self.answers) as lineage:
            self.lineage = lineage
            update = await self._spoken()
            if lineage is not None:
                # Committed before the node returns: what it returns names the handles.
                entries: list[HandleEntry] = update["handles"]
                used = [*self.reading.bound.granted(), *named_in(entries)]
                await lineage.commit(used, named_in(self.reading.entries))
            return update

    async def _spoken(self) -> dict[str, Any]:
        reading = self.reading
        try:
            system = await words_of(self.agent.name, "system", self.agent.system, self.state, self.config)
            prompt = await words_of(self.agent.name, "prompt", self.agent.prompt, self.state, self.config)
            view = await reading.view(system, self.agent.tools, summary=self._summary)
            refused = {} if self.lineage is None else self.lineage.refused
            lost = [(entry, refused.get(entry["handle"]["id"], why)) for entry, why in reading.lost.values()]
            tell_reencoded(self.place.node, lost)
            tell_words_of(self.engine, self.place.author, reading.words_of)
            sampling = sampling_of(self.agent, self.state)
            asked = await reading.showing.ask(view, prompt)
            reading.rendered.ask(prompt)
            told = await self._decode_all(view, sampling)
            reading.showing.keep_prompt()
        except ContextLengthError as error:
            raise reading.outgrown(error) from error
        finally:
            reading.release()
        entries = [
            entry_of(
                handle,
                place.author,
                reading.superstep,
                message,
                branch=place.branch,
                call=place.call,
                around=[task.branch for task in place.around],
                confidential=self.agent.confidential,
                persona=self.persona,
                prompt_text=prompt,
                system_texts=[
                    each for each in (system if callable(self.agent.system) else None, reading.summary) if each
                ],
                thoughts=thought and thought.plain(),
                prompt=asked and asked.plain(),
                answered=reading.attends_to_answers,
            )
            for place, message, handle, thought in told
        ]
        entries = [self.signer.signed(entry) for entry in (*reading.inputs, *entries)]
        messages = [said.message for said in told]
        return {"handles": entries, "messages": messages, **written(self.agent, messages)}

    async def _summary(self, function: Summary, messages: Sequence[BaseMessage]) -> str | None:
        """What its agent is told in place of messages that it does not keep."""
        return text_of(self.agent.name, "prompt", await called(function, [messages, self.state], self.config))

    async def _decode_all(self, view: PlacedView, sampling: Sampling) -> list[_EncodedPrompt]:
        """The messages over one view, each a call of its own."""
        if self.agent.n == 1:
            return [await _Call(self, self.place, view, sampling).say()]
        places = [self.place, *(self.place.next_call(self.config) for _ in range(self.agent.n - 1))]
        tasks: list[asyncio.Task[_EncodedPrompt]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(_Call(self, place, view, sampling).say()) for place in places]
        except BaseException as failed:
            for task in tasks:
                if task.done() and not task.cancelled() and task.exception() is None:
                    with suppress(HandleError):
                        self.engine.release(task.result().handle)  # nobody will ever name it
            if isinstance(failed, BaseExceptionGroup):
                raise failed.exceptions[0] from None
            raise
        return [task.result() for task in tasks]


class _Call:
    """One decode of a turn: how it samples, and what those are told of it who record or replay its run.

    Args:
        turn: Which it is of.
        place: Where in the run it stands.
        view: What its agent sees.
        sampling: The agent's.
    """

    def __init__(self, turn: AgentTurn, place: CallId, view: PlacedView, sampling: Sampling) -> None:
        self._turn, self._place, self._view = turn, place, view
        agent, engine, self._superstep = turn.agent, turn.engine, turn.reading.superstep
        header = header_of(agent, turn.state, engine.chat)
        self._thinking = thinking_of(agent, turn.state, engine.chat, self._room(header, sampling))
        self._opening = engine.model.encode(header)
        self._first_s: float | None = None
        """When its first token was there, as `time.perf_counter` counts."""
        if sampling.seed is None:
            sampling = sampling.model_copy(update={"seed": place.call_seed(engine.seed, self._superstep)})
        named = (place.author, self._superstep, place.branch, place.call)
        self._logits_callback = place.logits_callback and place.logits_callback(*named)
        forced = None if place.replay is None else place.replay[named]
        self._sampling = sampling if forced is None else sampling.model_copy(update={"forced_token_ids": forced})
        """With a seed of this very call, and the tokens that the run forces."""
        self._answer = self._asked = None
        self._listening = RunContext.of(turn.config).listening
        if self._listening.answer is None and not self._listening.said:
            return
        opened = engine.chat.assistant.opening(None).text
        self._asked = CallRequest(
            engine,
            *named,
            step=superstep_of(turn.config),
            handles=view.handles,
            offsets=view.offsets,
            end=view.end,
            sampling=self._sampling,
            told=(self._opening, repr(self._thinking), repr(agent.tool_choice)),
            adapter=agent.adapter,
            lead=opened[len(opened.rstrip(" ")) :],
            asked_s=time.perf_counter(),
            confidential=agent.confidential,
            thinks=self._thinking is not None,
        )
        if self._listening.answer is not None:
            self._answer = self._listening.answer(self._asked)
        if self._answer is not None and self._answer.is_set:
            self._sampling = sampling.model_copy(update={"forced_token_ids": self._answer.tokens})

    def _room(self, header: PromptText, sampling: Sampling) -> int:
        """Positions of the context behind the view that the agent's own turn does not need, but for its thoughts."""
        turn, engine, needed = self._turn, self._turn.engine, self._view.end
        own = [header, PromptText.special(engine.chat.turn_end)]
        if (thinking := thinking_of(turn.agent, turn.state, engine.chat, 1)) is not None:
            own += [PromptText.special(thinking.before + thinking.end), thinking.after]
            needed += BLANK_LINES
        needed += sum(len(engine.model.encode(text)) for text in own)
        rest = engine.model.adapter.max_positions - needed
        return rest - sampling.within(rest // 2).longest

    async def say(self) -> _EncodedPrompt:
        """Decode it, shown to the callbacks of its run."""
        turn, agent, rendered = self._turn, self._turn.agent, self._turn.reading.rendered
        config = merge_configs(turn.config, {"tags": [*agent.tags], "metadata": {**agent.metadata}})
        model, name = turn.engine.model, self._place.node
        async with decode_run(config, name, model, self._sampling, rendered.messages, rendered.tools) as run:
            told = await self._said(run)
        if self._asked is not None:
            tokens = tuple(each.token for each in turn.engine.logprobs(told.thought or told.handle))
            finish = turn.engine.inspect.finish_reason(told.handle)
            words = str(told.message.text)
            said = CallResult(tokens, words, finish, told.handle, told.thought, self._first_s, self._answer)
            for hear in self._listening.said:
                hear(self._asked, said)
        return told

    async def _said(self, run: DecodeRun) -> _EncodedPrompt:
        turn, agent, engine, place = self._turn, self._turn.agent, self._turn.engine, self._place
        message_id, thinking, view = place.message_id(self._superstep), self._thinking, self._view
        memo = place.idempotency_key(self._superstep) or str(uuid.uuid4())
        if turn.lineage is not None:
            # The engine is to know what was said in this place before, if the thread's log does.
            await turn.lineage.recall(memo, again=place.regenerate)
        at = place.at(self._superstep)
        # Without tools the engine leads it: it remembers what it has compiled.
        tools, required = required_tools(agent.tools, agent.tool_choice) if agent.tools else (agent.tools, None)
        speaking = OutputStream(
            engine,
            self._opening,
            thinking,
            self._sampling,
            tools,
            required,
            f"{at} {view.end}",
            message_id=message_id,
            name=place.node,
        )
        known = None if self._answer is None else self._answer.tokens
        stream = turn.reading.bound.astream(
            self._opening,
            view.handles,
            offsets=view.offsets,
            position=view.end,
            author=place.author,
            confidential=agent.confidential,
            idempotency_key=memo,
            regenerate=place.regenerate,
            adapter=agent.adapter,
            logits_callback=self._logits_callback,
            played=PlayedCall(at, known, known is not None),
            **speaking.asked,
        )
        handle = None
        async with aclosing(stream):
            async for item in stream:
                if isinstance(item, MessageHandle):
                    handle = item
                    continue
                self._first_s = self._first_s or time.perf_counter()
                await run.show(speaking.hear(item))
        assert handle is not None
        await run.show(speaking.rest())
        said = speaking.said(handle)
        try:
            beside = (
                {}
                if agent.response_format is None or said.calls or said.broken
                else agent.response_format.noted(said.words)
            )
        except ConstraintError:
            engine.release(handle)  # nobody will ever name it
            raise
        thought = next(reversed(engine.inspect.thoughts(handle, place.author, idempotency_key=memo)), None)
        read = sum(each.length for each in view.handles)
        message = speaking.reply(handle, said, thought, read=read, additional_kwargs=beside)
        noted = {
            "handle": handle.id,
            "model": handle.model,
            "length": handle.length,
            "author": turn.place.author,
            "persona": turn.persona,
            "confidential": agent.confidential,
            # With what it would start if its words had to be encoded again.
            **opening_noted(agent, turn.state),
        }
        message = turn.signer.noted(message, noted)
        await run.show(speaking.last(message))
        await run.end(message)
        first = self._first_s or time.perf_counter()
        report(engine, turn.place.node, handle, said.words, started_s=turn.started_s, first_token_s=first)
        return _EncodedPrompt(place, message, handle, thought)


async def with_update(agent: Speaker, said: dict[str, Any], state: Any, config: RunnableConfig) -> dict[str, Any]:
    """What a node writes when its agent has spoken: what was said, and what its function makes of that, if it has one.

    Args:
        agent: Who has spoken.
        said: What it writes by itself.
        state: The graph's, as it was before.
        config: The node's.

    Raises:
        InvalidRequestError: It makes of it what is no update, or writes handles, which are the agents' to write.
    """
    if agent.on_output is None:
        return said
    messages: Sequence[AIMessage] = said["messages"]
    words = messages[0] if len(messages) == 1 else list(messages)
    added_to: Mapping[str, Change] = {
        "handles": lambda held: merge_entries(held, said["handles"]),
        "messages": lambda held: add_messages([*(held or [])], [*said["messages"]]),
    }
    before = {"handles": None, "messages": None, **state} if isinstance(state, Mapping) else state
    after = rewritten(before, added_to)
    # What a dataclass works out of its messages is worked out of these.
    after = replace(cast(Any, after)) if is_dataclass(after) else after
    found = await called(agent.on_output, [words, after], config)
    command = found if isinstance(found, Command) else None
    written = found if command is None else command.update
    added = dict(written) if isinstance(written, Mapping) else {} if written is None else None
    if added is None or "handles" in added:
        what = "handles, which only agents write" if added else f"a {type(written).__name__}"
        raise InvalidRequestError(
            f"the update of {agent.name!r} must be a dict of channels or a Command of one, not {what}"
        )
    signed = sign(added, config, agent.reader_rules().node, agent.persona, confidential=agent.confidential)
    more = signed.pop("messages", None) or []
    # Else it overwrites the channel.
    whole = {**said, **signed, "messages": [*messages, *more] if isinstance(more, list) else more}
    if command is None:
        return whole
    goto = handed_on(command.goto, config, messages)
    # LangGraph takes a Command in the place of an update.
    return cast(dict[str, Any], Command(graph=command.graph, update=whole, resume=command.resume, goto=goto))
