"""One execution of an agent: find what is new, build its view, decode, say what it cost."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, NamedTuple, Protocol

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs

from choreo_agents.chat import (
    Described,
    MessageChunks,
    Reasoned,
    Speaking,
    Spoken,
    ToolChoice,
    led,
    reply,
    required_tools,
    thought_text,
)
from choreo_agents.engine import Engine, Thinking
from choreo_agents.errors import ContextLengthError, GuideError, HandleError
from choreo_agents.graph.answers import answers_in, tell_words_of
from choreo_agents.graph.durable.thread_log import RunLineage
from choreo_agents.graph.engines import engines_of
from choreo_agents.graph.keeping import named_in, speaking
from choreo_agents.graph.outputs import Writer, sampling_of, written
from choreo_agents.graph.provenance import ProvenState
from choreo_agents.graph.sending import sent_at
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.turn.streaming import DecodeRun, decode_run, report, tell_reencoded
from choreo_agents.graph.turn.turn_call import TurnCall
from choreo_agents.graph.view.history import Keep
from choreo_agents.graph.view.imported_prompt import ImportedPrompt
from choreo_agents.graph.view.merged_branches import MergeSpec
from choreo_agents.graph.view.placed_view import PlacedView
from choreo_agents.graph.view.reader_rules import CallReader, ReaderRules, placed_rules
from choreo_agents.graph.view.reading import Reading
from choreo_agents.graph.view.run_place import RunPlace
from choreo_agents.graph.words.entries import entry_of, still_said
from choreo_agents.graph.words.thoughts import Thinks, header_of, opening_of, thinking_of
from choreo_agents.graph.words.told import Prompt, called, text_of, words_of
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import FramedText
from choreo_agents.sampling import BLANK_LINES, Sampling

Choices = Sequence[str] | Callable[[Any], Sequence[str]]
"""The answers that an agent may give: always the same, or made of the graph's state."""


class Speaker(Writer, Protocol):
    """What a turn needs of its agent."""

    persona: str | None
    system: Prompt | None
    imported: ImportedPrompt | None
    prompt: Prompt | None
    header: str | None
    tools: Described
    tool_choice: ToolChoice
    adapter: str | None
    merging: MergeSpec | None
    confidential: bool
    thinking: Thinks
    history: Keep | None
    tags: Sequence[str]
    metadata: Mapping[str, Any]
    n: int

    def speaker(self, state: Any, /) -> str:
        """Whose name stands in the header."""
        ...

    def reader_rules(self) -> ReaderRules:
        """How its views are made."""
        ...


class _Told(NamedTuple):
    """What one call has said, and where in the run it stands."""

    place: RunPlace
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
        self.place = RunPlace.of(config, agent.name, state, node=rules.node)
        rules = placed_rules(rules, config, self.place.author)
        home = self.place.author.rpartition("|")[0]
        self.persona = f"{home}|{agent.persona}" if home and agent.persona else agent.persona or self.place.author
        proven = ProvenState(state, config, engine.lineage.seals)
        self.signer = proven.signer
        reader = CallReader(
            place=self.place,
            persona=self.persona,
            rules=rules,
            adapter=agent.adapter,
            imported=agent.imported,
            others=tuple(engines_of(config).values()),
            merging=agent.merging,
            confidential=agent.confidential,
            keep=agent.history,
        )
        entries = still_said(proven.entries, proven.messages, state)
        earliest = max(proven.superstep, sent_at(state))
        self.answers = answers_in(proven.messages)
        self.reading = Reading(engine, reader, proven.messages, entries, earliest)
        self._lineage: RunLineage | None = None

    async def speak(self) -> dict[str, Any]:
        """Decode one message, or as many as the agent says at a time, and return the update of the graph's state."""
        async with speaking(self.engine, self.config, self.reading.entries, self.answers) as lineage:
            self._lineage = lineage
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
            system, prompt = (
                await self._told("system", self.agent.system),
                await self._told("prompt", self.agent.prompt),
            )
            view = await reading.view(system, self.agent.tools, summary=self._summary)
            refused = {} if self._lineage is None else self._lineage.refused
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
                persona=self.persona,
                confidential=self.agent.confidential,
                prompt=asked,
                asked=prompt,
                told=[each for each in (system if callable(self.agent.system) else None, reading.summary) if each],
                thoughts=thought,
            )
            for place, message, handle, thought in told
        ]
        if reading.attends_to_answers:
            entries = [HandleEntry(**{**entry, "answered": True}) for entry in entries]
        entries = [self.signer.signed(entry) for entry in (*reading.inputs, *entries)]
        messages = [said.message for said in told]
        return {"handles": entries, "messages": messages, **written(self.agent, messages)}

    async def _told(self, what: str, words: Any) -> str | None:
        return await words_of(self.agent.name, what, words, self.state, self.config)

    async def _summary(self, messages: Sequence[BaseMessage]) -> str | None:
        """What its agent is told in place of messages that it does not keep."""
        keep, name = self.agent.history, self.agent.name
        if keep is None or keep.summary is None:
            return None
        return text_of(name, "prompt", await called(keep.summary, [messages, self.state], self.config))

    async def _decode_all(self, view: PlacedView, sampling: Sampling) -> list[_Told]:
        """The messages over one view, each a call of its own."""
        if self.agent.n == 1:
            return [await self._decode(view, sampling, self.place)]
        places = [self.place, *(self.place.next_call(self.config) for _ in range(self.agent.n - 1))]
        tasks: list[asyncio.Task[_Told]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(self._decode(view, sampling, place)) for place in places]
        except BaseException as failed:
            for task in tasks:
                if task.done() and not task.cancelled() and task.exception() is None:
                    with suppress(HandleError):
                        self.engine.release(task.result().handle)  # nobody will ever name it
            if isinstance(failed, BaseExceptionGroup):
                raise failed.exceptions[0] from None
            raise
        return [task.result() for task in tasks]

    async def _decode(self, view: PlacedView, sampling: Sampling, place: RunPlace) -> _Told:
        engine, superstep = self.engine, self.reading.superstep
        config = merge_configs(self.config, {"tags": [*self.agent.tags], "metadata": {**self.agent.metadata}})
        thinking = thinking_of(self.agent, self.state, engine.chat, self._room(view, sampling))
        header = header_of(self.agent, self.state, engine.chat), thinking
        call = TurnCall(self.config, self.agent, engine, place, superstep, view, sampling, header)
        read, tools = self.reading.rendered.messages, self.reading.rendered.tools
        async with decode_run(config, place.node, engine.model, call.sampling, read, tools) as run:
            told = await self._decode_in(run, view, place, call, thinking)
        call.said(told.message, told.handle, told.thought)
        return told

    async def _decode_in(
        self,
        run: DecodeRun,
        view: PlacedView,
        place: RunPlace,
        call: TurnCall,
        thinking: Thinking | None,
    ) -> _Told:
        engine, superstep = self.engine, self.reading.superstep
        message_id = place.message_id(superstep)
        memo = place.memo(superstep) or str(uuid.uuid4())
        if self._lineage is not None:
            await self._lineage.recall(memo, again=place.again)
        opening = call.opening
        chunks = MessageChunks(engine.model, thinking, message_id, place.node)
        speaking = Speaking(chunks, engine.model, self.agent.tools, f"{place.at(superstep)} {view.end}")
        header = opening if thinking is None else engine.model.encode(thinking.answer)
        sampling, guide, tools = call.sampling, None, self.agent.tools
        if tools:
            sampling, guide = led(engine, *required_tools(tools, self.agent.tool_choice), sampling)
        stream = self.reading.bound.astream(
            opening,
            view.handles,
            offsets=view.offsets,
            new_offset=view.end,
            sampling=sampling,
            author=place.author,
            confidential=self.agent.confidential,
            closing=engine.chat.turn_end,
            ends=speaking.ends,
            in_parts=speaking.in_parts,
            memo=memo,
            anew=place.again,
            adapter=self.agent.adapter,
            watch=call.watch,
            thinking=thinking,
            guide=guide,
            played=call.played,
        )
        handle = None
        async with aclosing(stream):
            async for item in stream:
                if isinstance(item, MessageHandle):
                    handle = item
                    continue
                call.first_s = call.first_s or time.perf_counter()
                await run.show(speaking.hear(item))
        assert handle is not None
        await run.show(speaking.rest())
        said = speaking.said(engine.tokens(handle)[len(header) :])
        try:
            called, output = said.calls or said.broken, self.agent.output
            beside = {} if output is None or called else output.noted(said.words)
        except GuideError:
            engine.release(handle)  # nobody will ever name it
            raise
        thought = next(reversed(engine.inspect.thoughts(handle, place.author, memo=memo)), None)
        seen = sum(each.length for each in view.handles)
        reasoned = thought_text(engine, thought, handle, thinking)
        message = _message(self, said, handle, reasoned, message_id, seen, len(header), beside)
        await run.show(chunks.last(message))
        await run.end(message)
        first = call.first_s or time.perf_counter()
        report(engine, self.place.node, handle, said.words, started_s=self.started_s, first_token_s=first)
        return _Told(place, message, handle, thought)

    def _room(self, view: PlacedView, sampling: Sampling) -> int:
        """Positions of the context behind a view that the agent's own turn does not need, but for its thoughts."""
        engine, chat = self.engine, self.engine.chat
        own = [header_of(self.agent, self.state, chat), FramedText.frame(chat.turn_end)]
        needed = view.end
        if (thinking := thinking_of(self.agent, self.state, chat, 1)) is not None:
            own += [FramedText.frame(thinking.before + thinking.end), thinking.after]
            needed += BLANK_LINES
        needed += sum(len(engine.model.encode(text)) for text in own)
        rest = engine.model.adapter.max_positions - needed
        return rest - sampling.within(rest // 2).longest


def _message(
    turn: AgentTurn,
    spoken: Spoken,
    handle: MessageHandle,
    reasoned: Reasoned,
    message_id: str,
    seen: int,
    header: int,
    beside: dict[str, Any],
) -> AIMessage:
    """What was said, as it stands in the graph's state, signed."""
    noted = {
        "handle": handle.id,
        "model": handle.model,
        "length": handle.length,
        "author": turn.place.author,
        "persona": turn.persona,
        "confidential": turn.agent.confidential,
        # With what it would start if its words had to be encoded again.
        **opening_of(turn.agent, turn.state),
    }
    said = reply(
        turn.engine,
        handle,
        spoken,
        reasoned,
        read=seen,
        header=header,
        name=turn.place.node,
        id=message_id,
        additional_kwargs=beside,
    )
    return turn.signer.noted(said, noted)
