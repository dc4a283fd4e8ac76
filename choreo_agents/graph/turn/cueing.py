"""What a turn tells whoever listens to its run, and is told by them."""

from __future__ import annotations

import time
from typing import Protocol

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from torch import Tensor

from choreo_agents.chat import Described, ToolChoice
from choreo_agents.engine import Engine, PlayedCall, Thinking
from choreo_agents.graph.langgraph_internals import superstep_of
from choreo_agents.graph.recording.listening import AskedCall, Cue, Look, SaidCall, listener_in
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


class CuedCall:
    """One call of a turn, as those have it who listen to its run.

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
        self._listener, self._place, self._superstep = listener_in(config), place, superstep
        self._engine, opens = engine, engine.model.encode(opening)
        self._read = sum(handle.length for handle in view.handles)
        self._asked: AskedCall | None = None
        self.cue = Cue()
        """What it is told."""
        self._most = sampling.max_tokens
        self.first_s: float | None = None
        """When its first token was there, as `time.perf_counter` counts."""
        if self._listener is not None:
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
                sampling=sampling,
                derived_seed=place.call_seed(engine.seed, superstep),
                rest=(opens, repr(thinking), agent.adapter, repr(agent.tool_choice)),
                header=len(opens),
                lead=opened[len(opened.rstrip(" ")) :],
                asked_s=time.perf_counter(),
                confidential=agent.confidential,
                thinks=thinking is not None,
            )
            self.cue = self._listener.cue(self._asked)

    def sampled(self, sampling: Sampling) -> Sampling:
        """The agent's sampling with a seed of this very call, or with the tokens that the run replays."""
        at = (self._place.author, self._superstep, self._place.branch, self._place.call)
        replay = None if self._place.replay is None else self._place.replay[at]
        forced = replay if self.cue.replaces is None else self.cue.replaces
        if forced is not None:
            self._most = len(forced)
            return sampling.model_copy(update={"forced": forced})
        if sampling.seed is not None:
            return sampling
        told = self.cue.seed
        seed = self._place.call_seed(self._engine.seed, self._superstep) if told is None else told
        return sampling.model_copy(update={"seed": seed})

    @property
    def message(self) -> str:
        """The id of what it says."""
        return self.cue.message or self._place.message_id(self._superstep)

    @property
    def played(self) -> PlayedCall:
        """Which call of the run it is."""
        return PlayedCall(self._place.at(self._superstep), self.cue.tokens, self.cue.at_once)

    @property
    def watch(self) -> Look | None:
        """Who is shown its logits."""
        place = self._place
        found = place.watch and place.watch(place.author, self._superstep, place.branch, place.call)
        looks = [look for look in (found, self.cue.look) if look is not None]

        def show(logits: Tensor) -> None:
            for look in looks:
                look(logits)

        return show if looks else None

    def said(self, message: AIMessage, handle: MessageHandle, thought: MessageHandle | None) -> None:
        """Tell what came of it."""
        if self._listener is None or self._asked is None:
            return
        chosen = self._engine.logprobs(thought or handle)
        tokens = tuple(each.token for each in chosen)
        finish = self._engine.inspect.finish_reason(handle)
        plain = str(message.id), tokens, str(message.text), finish, self._read
        said = SaidCall(*plain, handle, thought, self._most, self.first_s)
        self._listener.said(self._asked, self.cue, said)
