"""One call of a turn: how it samples, and what those are told of it who record or replay its run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from torch import Tensor

from choreo_agents.chat import Described, ToolChoice
from choreo_agents.engine import Engine, PlayedCall, Thinking
from choreo_agents.graph.langgraph_internals import superstep_of
from choreo_agents.graph.listening import AskedCall, SaidCall
from choreo_agents.graph.run_context import RunContext
from choreo_agents.graph.view.placed_view import PlacedView
from choreo_agents.graph.view.run_place import RunPlace
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import FramedText
from choreo_agents.sampling import Sampling


class Asking(Protocol):
    """What is asked of an agent."""

    adapter: str | None
    confidential: bool
    tools: Described
    tool_choice: ToolChoice


class TurnCall:
    """Of one place in a run.

    Args:
        config: The node's.
        agent: Who speaks.
        engine: The agent's.
        place: Of the call; `superstep` is the turn's.
        view: What it sees.
        sampling: The agent's.
        header: What its message starts with, and how it is thought out.
    """

    def __init__(
        self,
        config: RunnableConfig,
        agent: Asking,
        engine: Engine,
        place: RunPlace,
        superstep: int,
        view: PlacedView,
        sampling: Sampling,
        header: tuple[FramedText, Thinking | None],
    ) -> None:
        opening, thinking = header
        self._listening, self._place = RunContext.of(config).listening, place
        self._superstep, self._engine = superstep, engine
        self.opening = engine.model.encode(opening)
        """The tokens of its header."""
        self.first_s: float | None = None
        """When its first token was there, as `time.perf_counter` counts."""
        if sampling.seed is None:
            sampling = sampling.model_copy(update={"seed": place.call_seed(engine.seed, superstep)})
        forced = None if place.replay is None else place.replay[place.author, superstep, place.branch, place.call]
        self.sampling = sampling if forced is None else sampling.model_copy(update={"forced": forced})
        """With a seed of this very call, and the tokens that the run forces."""
        self._answer = self._asked = None
        if self._listening.answer is None and not self._listening.said:
            return
        opened = engine.chat.assistant.opening(None).text
        self._asked = AskedCall(
            engine=engine,
            author=place.author,
            superstep=superstep,
            branch=place.branch,
            call=place.call,
            step=superstep_of(config),
            handles=view.handles,
            offsets=view.offsets,
            end=view.end,
            sampling=self.sampling,
            told=(self.opening, repr(thinking), repr(agent.tool_choice)),
            adapter=agent.adapter,
            lead=opened[len(opened.rstrip(" ")) :],
            asked_s=time.perf_counter(),
            confidential=agent.confidential,
            thinks=thinking is not None,
        )
        if self._listening.answer is not None:
            self._answer = self._listening.answer(self._asked)
        if self._answer is not None and self._answer.is_set:
            self.sampling = sampling.model_copy(update={"forced": self._answer.tokens})

    @property
    def played(self) -> PlayedCall:
        """Which call of the run it is, and its answer, if that is known."""
        tokens = None if self._answer is None else self._answer.tokens
        return PlayedCall(self._place.at(self._superstep), tokens, tokens is not None)

    @property
    def watch(self) -> Callable[[Tensor], None] | None:
        """Who is shown its logits."""
        place = self._place
        return place.watch and place.watch(place.author, self._superstep, place.branch, place.call)

    def said(self, message: AIMessage, handle: MessageHandle, thought: MessageHandle | None) -> None:
        """Tell what came of it."""
        if self._asked is None:
            return
        tokens = tuple(each.token for each in self._engine.logprobs(thought or handle))
        finish = self._engine.inspect.finish_reason(handle)
        said = SaidCall(tokens, str(message.text), finish, handle, thought, self.first_s, self._answer)
        for hear in self._listening.said:
            hear(self._asked, said)
