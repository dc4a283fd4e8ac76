"""Who is asked before an agent's call, and told what came of calls and functions: whoever records or replays a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.engine import Engine
from choreo_agents.engine.recording.recorder import Digests
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.sampling import Sampling


@dataclass(frozen=True)
class AskedCall:
    """A call that an agent is about to make."""

    engine: Engine
    author: str
    superstep: int
    branch: int
    call: int
    step: int
    """LangGraph's number of the superstep."""
    handles: Sequence[MessageHandle]
    offsets: Sequence[int]
    end: int
    """What its view holds, where, and where its own message starts."""
    sampling: Sampling
    """With its seed."""
    told: Sequence[Any]
    """How its turn begins, JSON-plain: the tokens of its header, how it thinks, which tools it must call."""
    adapter: str | None
    lead: str
    """What stands between its header and its first word."""
    asked_s: float
    """As `time.perf_counter` counts."""
    confidential: bool
    thinks: bool

    @property
    def place(self) -> tuple[str, int, int, int]:
        """The same in every run of the same graph, but for branches of subgraphs."""
        return self.author, self.superstep, self.branch, self.call

    def request(self, digests: Digests) -> dict[str, str]:
        """Digests of all that what it says depends on, by what that is."""
        sampling = self.sampling.with_defaults(self.engine.model.sampling_defaults)
        asked: Mapping[str, Any] = {
            "turn": self.told,
            "model": self.engine.record.encoder(self.adapter),
            "sampling": sampling.model_dump(mode="json", exclude={"seed", "forced", "n", "logprobs"}),
            "seed": self.sampling.seed if sampling.temperature > 0 else None,
        }
        return self.engine.record.digests(digests.key).request(self.handles, self.offsets, self.end, asked)


@dataclass(frozen=True)
class Answer:
    """What a call says, which is not asked for it."""

    tokens: tuple[int, ...]
    is_set: bool = False
    """Whether somebody wants it to say that, or has wanted it when it was recorded: it has not sampled it."""


@dataclass(frozen=True)
class SaidCall:
    """What came of a call."""

    tokens: tuple[int, ...]
    """What was sampled, thoughts included."""
    words: str
    finish: str | None
    handle: MessageHandle
    """Of the answer."""
    thought: MessageHandle | None
    """Of what was decoded to think it out, with the answer."""
    first_s: float | None
    """When its first token was there; None: there was none."""
    answer: Answer | None
    """What it was to say."""


@dataclass(frozen=True)
class PlayedNode:
    """One execution of a node that is no agent, as whoever listens has it."""

    value: Any = None
    """What it returns, if that is known: then it does not run."""
    is_known: bool = False
    keep: Callable[[Any], None] = lambda value: None
    """Told what it returned."""


@dataclass(frozen=True)
class Listening:
    """Of one run. What it holds may be called from any thread."""

    answer: Callable[[AskedCall], Answer | None] | None = None
    """What a call is to say; None: the model is asked."""
    said: tuple[Callable[[AskedCall, SaidCall], None], ...] = ()
    ran: Callable[[RunnableConfig, float, BaseException | None], None] | None = None
    """Told when a node that is no agent has run: with its config, when it began, as `time.perf_counter` counts, and
    how it has failed."""
    play: Callable[[Any, RunnableConfig], PlayedNode] | None = None
    """Asked before a node that is no agent runs, with its input."""
