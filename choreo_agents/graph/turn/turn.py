"""An execution of an agent: encode new messages, build its view, decode, report the usage, return the state update."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs
from langgraph.graph.message import add_messages
from langgraph.types import Command

from choreo_agents.chat import OutputStream, answer_header, required_tools, thinking_before, thinks, with_budget
from choreo_agents.engine import Engine, PlayedCall, Thinking
from choreo_agents.errors import ConstraintError, ContextLengthError, HandleError, InvalidRequestError
from choreo_agents.graph.answers import answers_in, warn_unencoded
from choreo_agents.graph.durable.thread_log import RunLineage
from choreo_agents.graph.keeping import all_handles, lease_to_thread
from choreo_agents.graph.langgraph_internals import superstep_of
from choreo_agents.graph.outputs import PARSED
from choreo_agents.graph.prompts import called, prompt_text
from choreo_agents.graph.run_context import CallPlace, CallRequest, CallResult, RunContext
from choreo_agents.graph.signer import Change, ProvenState, entry_of, forward_sends, rewritten, sign
from choreo_agents.graph.state import merge_entries
from choreo_agents.graph.turn.streaming import DecodeRun, decode_run, report_decode, report_reencoded
from choreo_agents.graph.view.call_id import CallId
from choreo_agents.graph.view.entries import EncodedEntries
from choreo_agents.graph.view.placed_view import PlacedView
from choreo_agents.graph.view.reader_rules import CallReader, placed_rules
from choreo_agents.graph.view.view_builder import ViewBuilder
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, PromptText
from choreo_agents.sampling import BLANK_LINES, Sampling

if TYPE_CHECKING:
    from choreo_agents.graph.agent import Agent


class _DecodedMessage(NamedTuple):
    """A decoded message, and the id of its call."""

    place: CallId
    message: AIMessage
    handle: MessageHandle
    thought: MessageHandle | None
    """Handle of thoughts and answer as they were decoded; None: no thoughts."""


class AgentTurn:
    """A call of an agent's node.

    Args:
        agent: The agent.
        engine: Encodes and decodes.
        state: State of the graph.
        config: Config of the node.
    """

    def __init__(self, agent: Agent, engine: Engine, state: Any, config: RunnableConfig) -> None:
        self.started_s = time.perf_counter()
        self.agent, self.engine, self.state, self.config = agent, engine, state, config
        rules = agent.reader_rules()
        self.place = CallId.of(config, agent.name, state, node=rules.node)
        rules = placed_rules(rules, config, self.place.author)
        prefix = self.place.author.rpartition("|")[0]
        self.persona = f"{prefix}|{agent.persona}" if prefix and agent.persona else agent.persona or self.place.author
        proven = ProvenState(state, config, engine.lineage.seals)
        self.signer = proven.signer
        engines = engine, *RunContext.of(config).engines.values()
        self.encoded = EncodedEntries(CallReader(self.place, self.persona, rules, agent, engines), proven, state)
        self.reading = ViewBuilder(self.encoded)
        self.lineage: RunLineage | None = None

    async def speak(self) -> dict[str, Any]:
        """Decode the agent's messages (`n` of them), and return the update of the graph's state."""
        answers = answers_in(self.encoded.messages)
        async with lease_to_thread(self.engine, self.config, self.encoded.all, answers) as lineage:
            self.lineage = lineage
            update = await self._build_update()
            if lineage is not None:
                # Committed before the node returns: a checkpoint must not name handles whose lineage could be lost.
                used = [*self.encoded.bound.granted.values(), *all_handles(update["handles"])]
                await lineage.commit(used, all_handles(self.encoded.all))
            return update

    async def _build_update(self) -> dict[str, Any]:
        reading = self.reading
        try:
            system = await prompt_text(self.agent.name, "system", self.agent.system, self.state, self.config)
            prompt = await prompt_text(self.agent.name, "prompt", self.agent.prompt, self.state, self.config)
            view = await reading.view(system, self.state, self.config)
            refused = {} if self.lineage is None else self.lineage.refused
            lost = [(entry, refused.get(entry["handle"]["id"], why)) for entry, why in self.encoded.lost.values()]
            report_reencoded(self.place.node, lost)
            warn_unencoded(self.place.author, reading.words_of)
            sampling = sampling_of(self.agent, self.state)
            prompt_handle = await reading.ask(view, prompt)
            decoded = await self._decode_all(view, sampling)
            self.encoded.bound.keep(prompt_handle)  # the message in the state refers to it
        except ContextLengthError as error:
            raise reading.outgrown(error) from error
        finally:
            reading.release()
        made = system if callable(self.agent.system) else None
        entries = [
            entry_of(
                handle,
                place.author,
                self.encoded.superstep,
                message,
                branch=place.branch,
                call=place.call,
                task_path=[task.branch for task in place.around],
                confidential=self.agent.confidential,
                persona=self.persona,
                prompt_text=prompt,
                system_texts=[text for text in (made, reading.summary) if text],
                thoughts=thought and thought.plain(),
                prompt=prompt_handle and prompt_handle.plain(),
                answered=reading.attends_to_answers,
            )
            for place, message, handle, thought in decoded
        ]
        entries = [self.signer.sign_entry(entry) for entry in (*self.encoded.made, *entries)]
        messages = [item.message for item in decoded]
        return {"handles": entries, "messages": messages, **channel_update(self.agent, messages)}

    async def _decode_all(self, view: PlacedView, sampling: Sampling) -> list[_DecodedMessage]:
        """Decode `n` messages over one view, each a call of its own; an error cancels and releases the others."""
        if self.agent.n == 1:
            return [await _Call(self, self.place, view, sampling).decode()]
        places = [self.place, *(self.place.next_call(self.config) for _ in range(self.agent.n - 1))]
        tasks: list[asyncio.Task[_DecodedMessage]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(_Call(self, place, view, sampling).decode()) for place in places]
        except BaseException as error:
            for task in tasks:
                if task.done() and not task.cancelled() and task.exception() is None:
                    with suppress(HandleError):
                        self.engine.release(task.result().handle)  # it gets no entry: nobody else could release it
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        return [task.result() for task in tasks]


class _Call:
    """A decode of a turn: its sampling, and its reports to the run's listener (a recorder or a replay).

    Args:
        turn: The turn.
        place: Id of the call in the run.
        view: View of the agent.
        sampling: Sampling of the agent.
    """

    def __init__(self, turn: AgentTurn, place: CallId, view: PlacedView, sampling: Sampling) -> None:
        self._turn, self._place, self._view = turn, place, view
        agent, engine, self._superstep = turn.agent, turn.engine, turn.encoded.superstep
        header = header_of(agent, turn.state, engine.chat)
        thinking = thinking_of(agent, turn.state, engine.chat)
        if thinking is not None:
            thinking = with_budget(thinking, agent.thinking, self._free_positions(header, thinking, sampling))
        self._thinking = thinking
        self._opening = engine.model.encode(header)
        self._first_s: float | None = None
        """`time.perf_counter` at the first token."""
        if sampling.seed is None:
            sampling = sampling.model_copy(update={"seed": place.call_seed(engine.seed, self._superstep)})
        named = CallPlace(place.author, self._superstep, place.branch, place.call)
        self._logits_callback = place.logits_callback and place.logits_callback(*named)
        forced = None if place.replay is None else place.replay[named]
        self._sampling = sampling if forced is None else sampling.model_copy(update={"forced_token_ids": forced})
        """Sampling with this call's seed, and the tokens that a replay forces."""
        self._listener = RunContext.of(turn.config).listener
        opening_text = engine.chat.assistant.opening(None).text
        self._request = CallRequest(
            engine,
            named,
            step=superstep_of(turn.config),
            handles=view.handles,
            offsets=view.offsets,
            end=view.end,
            sampling=self._sampling,
            turn=(self._opening, repr(self._thinking), repr(agent.tool_choice)),
            adapter=agent.adapter,
            lead=opening_text[len(opening_text.rstrip(" ")) :],
            asked_s=time.perf_counter(),
            confidential=agent.confidential,
            thinks=self._thinking is not None,
        )
        self._answer = None if self._listener.answer is None else self._listener.answer(self._request)
        if self._answer is not None and self._answer.is_set:
            self._sampling = sampling.model_copy(update={"forced_token_ids": self._answer.tokens})

    def _free_positions(self, header: PromptText, thinking: Thinking, sampling: Sampling) -> int:
        """Return the positions that are left for thoughts, after view, headers and the longest answer."""
        model, closing = self._turn.engine.model, thinking.before + thinking.end
        texts = header, PromptText.special(closing), thinking.after, PromptText.special(model.chat.turn_end)
        needed = self._view.end + BLANK_LINES + sum(len(model.encode(text)) for text in texts)
        free = model.adapter.max_positions - needed
        return free - sampling.within(free // 2).longest

    async def decode(self) -> _DecodedMessage:
        """Decode the message as a chat-model run, and report the result to the listener."""
        turn, agent, reading = self._turn, self._turn.agent, self._turn.reading
        config = merge_configs(turn.config, {"tags": [*agent.tags], "metadata": {**agent.metadata}})
        model, name = turn.engine.model, self._place.node
        async with decode_run(config, name, model, self._sampling, reading.rendered, reading.rendered_tools) as run:
            decoded = await self._decode(run)
        if self._listener.on_call:
            tokens = tuple(sampled.token for sampled in turn.engine.logprobs(decoded.thought or decoded.handle))
            finish = turn.engine.inspect.finish_reason(decoded.handle)
            text = str(decoded.message.text)
            result = CallResult(tokens, text, finish, decoded.handle, decoded.thought, self._first_s, self._answer)
            for callback in self._listener.on_call:
                callback(self._request, result)
        return decoded

    async def _decode(self, run: DecodeRun) -> _DecodedMessage:
        turn, agent, engine, place = self._turn, self._turn.agent, self._turn.engine, self._place
        message_id, thinking, view = place.message_id(self._superstep), self._thinking, self._view
        key = place.idempotency_key(self._superstep) or str(uuid.uuid4())
        if turn.lineage is not None:
            # An answer that this call had before a restart may stand in the thread's log only.
            await turn.lineage.recall(key, regenerate=place.regenerate)
        at = place.at(self._superstep)
        # Without tools the engine applies the sampling's constraint itself, from its cache of compiled ones.
        tools, required = required_tools(agent.tools, agent.tool_choice) if agent.tools else (agent.tools, None)
        request = engine, self._opening, thinking, self._sampling, tools, required, f"{at} {view.end}"
        output = OutputStream(*request, message_id=message_id, name=place.node)
        played = None if self._answer is None else self._answer.tokens
        stream = turn.encoded.bound.astream(
            self._opening,
            view.handles,
            tokens=run.is_watched,
            offsets=view.offsets,
            position=view.end,
            author=place.author,
            confidential=agent.confidential,
            idempotency_key=key,
            regenerate=place.regenerate,
            adapter=agent.adapter,
            logits_callback=self._logits_callback,
            played=PlayedCall(at, played, played is not None),
            **output.decode_args,
        )
        began_s, handle = time.perf_counter(), None
        async with aclosing(stream):
            async for item in stream:
                if isinstance(item, MessageHandle):
                    handle = item
                    continue
                self._first_s = self._first_s or time.perf_counter()
                await run.show(output.add(item))
        assert handle is not None
        await run.show(output.end())
        thought = next(reversed(engine.inspect.thoughts(handle, place.author, idempotency_key=key)), None)
        usage = engine.usage(thought or handle)
        if self._first_s is None and usage.ttft_s is not None:
            # Counted back: a call may wait before it is submitted. One that was answered before took no time.
            self._first_s = max(began_s, time.perf_counter() - (usage.duration_s - usage.ttft_s))
        parsed = output.parse(handle)
        try:
            form = None if parsed.calls or parsed.broken else agent.response_format
            extra = {} if form is None else form.parse(parsed.words)
        except ConstraintError:
            engine.release(handle)  # it gets no entry: nobody else could release it
            raise
        tokens_read = sum(parent.length for parent in view.handles)
        message = output.reply(handle, parsed, thought, tokens_read=tokens_read, additional_kwargs=extra)
        encoded = {"handle": handle.id, "model": handle.model, "length": handle.length}
        said_by = {"author": turn.place.author, "persona": turn.persona, "confidential": agent.confidential}
        # The turn's opening, in case that its text has to be encoded again.
        note = {**encoded, **said_by, **opening_noted(agent, turn.state)}
        message = turn.signer.sign_message(message, note)
        await run.show(output.last(message))
        await run.end(message)
        first_s = self._first_s or time.perf_counter()
        report_decode(engine, turn.place.node, handle, parsed.words, started_s=turn.started_s, first_token_s=first_s)
        return _DecodedMessage(place, message, handle, thought)


# What an agent's options say of one call


def sampling_of(agent: Agent, state: Any) -> Sampling:
    """Return an agent's sampling, with its response format or its choices for this state."""
    if agent.response_format is not None:
        return agent.sampling.model_copy(update={"constraint": agent.response_format.grammar})
    choices = agent.choices(state) if callable(agent.choices) else agent.choices
    if not choices:
        return agent.sampling
    if isinstance(choices, str) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise InvalidRequestError(f"the choices of {agent.name!r} must be a list of non-empty strings, not {choices!r}")
    # Text in graph state is stripped, and routes compare it with the choices.
    stripped = tuple(dict.fromkeys(choice.strip() for choice in choices))
    return agent.sampling.model_copy(update={"choices": stripped, "answer_prefix": agent.answer_prefix})


def channel_update(agent: Agent, messages: Sequence[AIMessage]) -> dict[str, Any]:
    """Return the update of an agent's output channel: the parsed output or text of its message, or a list of them.

    Empty if it calls tools instead of answering in its response format.
    """
    if agent.output_key is None:
        return {}
    if agent.response_format is not None:
        messages = [message for message in messages if not (message.tool_calls or message.invalid_tool_calls)]
    values = [message.additional_kwargs.get(PARSED, str(message.text)) for message in messages]
    return {agent.output_key: values if agent.writes_list else values[0]} if values else {}


def thinking_of(agent: Agent, state: Any, chat: ChatFormat) -> Thinking | None:
    """Return how an agent thinks in a call; None: it does not.

    Args:
        agent: The agent.
        state: State of the graph.
        chat: Chat format of its model.
    """
    if not thinks(chat, agent.thinking, agent.name):
        return None
    if agent.assistant_prefix is None:
        return thinking_before(chat, agent.speaker(state), calls=bool(agent.tools))
    default, lead = Thinking.of(chat, None), PromptText.special(agent.assistant_prefix)
    return replace(default, answer=chat.assistant.opening(None) + lead, after=default.after + lead)


def header_of(agent: Agent, state: Any, chat: ChatFormat) -> PromptText:
    """Return the header that a decode of an agent starts with."""
    has_thoughts = thinks(chat, agent.thinking, agent.name)
    if agent.assistant_prefix is None or has_thoughts:
        return answer_header(chat, agent.speaker(state), thinks=has_thoughts, calls=bool(agent.tools))
    opening, bare = chat.assistant.opening(None), chat.header(None)
    # A template that puts a space before the first word has it before an own header, too.
    return (opening if bare == opening.rstrip(" ") else bare) + PromptText.special(agent.assistant_prefix)


def opening_noted(agent: Agent, state: Any) -> dict[str, str]:
    """Return the opening of an agent's turn, for encoding its text again."""
    if agent.assistant_prefix is not None:
        return {"header": agent.assistant_prefix}
    # An agent with tools starts without its name, which other readers get where its text is part of a user turn.
    return {"speaker": agent.speaker(state)} | ({"header": ""} if agent.tools else {})


async def with_update(agent: Agent, output: dict[str, Any], state: Any, config: RunnableConfig) -> dict[str, Any]:
    """Return the state update of an agent's node, extended by that of its `on_output` function.

    Args:
        agent: The agent.
        output: Update of its turn.
        state: State of the graph before the turn.
        config: Config of the node.

    Raises:
        InvalidRequestError: The function returns no update, or writes `handles`, which only agents write.
    """
    if agent.on_output is None:
        return output
    messages: Sequence[AIMessage] = output["messages"]
    answer = messages[0] if len(messages) == 1 else list(messages)
    added_to: Mapping[str, Change] = {
        "handles": lambda entries: merge_entries(entries, output["handles"]),
        "messages": lambda listed: add_messages([*(listed or [])], [*output["messages"]]),
    }
    before = {"handles": None, "messages": None, **state} if isinstance(state, Mapping) else state
    after = rewritten(before, added_to)
    # Runs `__post_init__`, which may derive fields from the messages.
    after = replace(cast(Any, after)) if is_dataclass(after) else after
    result = await called(agent.on_output, [answer, after], config)
    command = result if isinstance(result, Command) else None
    changes = result if command is None else command.update
    added = dict(changes) if isinstance(changes, Mapping) else {} if changes is None else None
    if added is None or "handles" in added:
        wrong = "handles, which only agents may write" if added else f"a {type(changes).__name__}"
        raise InvalidRequestError(
            f"on_output of {agent.name!r} must return a dict of channels or a Command with one, not {wrong}"
        )
    signed = sign(added, config, agent.reader_rules().node, agent.persona, confidential=agent.confidential)
    extra = signed.pop("messages", None) or []
    # An `Overwrite` of the function replaces the channel.
    merged = {**output, **signed, "messages": [*messages, *extra] if isinstance(extra, list) else extra}
    if command is None:
        return merged
    goto = forward_sends(command.goto, config, messages)
    # The cast: LangGraph takes a Command in place of an update.
    return cast(dict[str, Any], Command(graph=command.graph, update=merged, resume=command.resume, goto=goto))
