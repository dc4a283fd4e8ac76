"""One debate under one method: what was said, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from langchain_core.messages import AIMessage, BaseMessage

from choreo_agents.engine import Engine, Memory
from choreo_agents.engine.settings import MethodName
from choreo_agents.engine.stock.memory_map import MemoryMap
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.graph.view.run_options import Replay
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.debate import debate, final_answer
from choreo_agents.workflows.running import OnDecode, OnToken, run_graph


class Debated(Protocol):
    """What a debate is about, and what each agent knows of it."""

    @property
    def rules(self) -> str:
        """The public root."""
        ...

    @property
    def question(self) -> str: ...

    @property
    def answer(self) -> str:
        """The right one."""
        ...

    @property
    def agents(self) -> tuple[str, ...]: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Each agent's private system prompt."""
        ...

    @property
    def record(self) -> tuple[str, ...]:
        """What all of them read before they are asked; nothing, if their notes say all there is to know."""
        ...

    def is_correct(self, reply: str) -> bool:
        """Whether a reply states the answer."""
        ...


@dataclass(frozen=True)
class Cost:
    """What one run cost."""

    tokens_encoded: int
    """For the first time, or again since memory had lost them."""
    tokens_reused: int
    ttft_mean_s: float
    """Mean seconds from a node's start to its first token: encoding of whatever was not encoded yet included."""
    end_to_end_s: float
    """From the graph's start to its end."""
    rows_per_step: float


@dataclass(frozen=True)
class Utterance:
    """One message of a debate."""

    round: int
    agent: str
    words: str


@dataclass(frozen=True)
class DebateRun:
    """A debate that was held."""

    utterances: tuple[Utterance, ...]
    answer: str
    correct: bool
    cost: Cost
    said: Replay
    """The tokens of every message, to force upon another method."""
    memory: MemoryMap
    """The engine's, at the end."""


@dataclass(frozen=True)
class DebateSetting:
    """A debate to be held."""

    model: LoadedModel
    problem: Debated
    rounds: int
    seed: int = 0
    sampling: Sampling = Sampling(temperature=0.0, max_tokens=32)
    kv_budget_bytes: int = 1 << 28
    host_bytes: int = 0
    disk: Path | None = None


def hold(
    setting: DebateSetting,
    method: MethodName,
    *,
    replay: Replay | None = None,
    on_token: OnToken | None = None,
    on_decode: OnDecode = lambda item: None,
) -> DebateRun:
    """Hold a debate on a fresh engine, with free decoding or with forced tokens.

    Args:
        setting: Model, problem and rounds.
        method: How the engine serves it.
        replay: The tokens that every agent must say.
        on_token: Sees the words as they come.
        on_decode: Sees what each message cost.
    """
    problem = setting.problem
    # What everybody reads is encoded once for all; a question with nothing to read is the input itself.
    told = problem.record or (problem.question,)
    graph = debate(
        dict(zip(problem.agents, problem.notes, strict=True)),
        rounds=setting.rounds,
        system=problem.rules,
        question=problem.question if problem.record else None,
        sampling=setting.sampling,
    )
    with Engine.load(
        setting.model,
        method=method,
        memory=Memory(kv_budget_bytes=setting.kv_budget_bytes, host_bytes=setting.host_bytes, disk=setting.disk),
        seed=setting.seed,
    ) as engine:
        seen: Any = {"on_token": on_token, "on_decode": on_decode}
        messages = [("user", words) for words in told]
        state, spent = run_coroutine(run_graph(engine, graph, messages, replay=replay, **seen))
        stats, memory = engine.stats(), engine.kv.memory_map()
        said = {
            (entry["author"], entry["superstep"], entry["branch"], entry["call"]): _generated(engine, entry)
            for entry in state["handles"]
            if entry["author"] in problem.agents
        }
    answer = final_answer(state["messages"], problem.agents)
    encoded = stats.tokens_encoded + stats.tokens_recomputed
    cost = Cost(encoded, stats.tokens_reused, mean(spent.ttft_s), spent.end_to_end_s, stats.rows_per_step)
    return DebateRun(_utterances(state["messages"]), answer, problem.is_correct(answer), cost, said, memory)


def _generated(engine: Engine, entry: Any) -> tuple[int, ...]:
    """The tokens of a message after its header."""
    *_, made = engine.inspect.records([MessageHandle.model_validate(entry["handle"])])
    return made.tokens[0 if made.sampled is None else made.sampled[0] :]


def _utterances(messages: list[BaseMessage]) -> tuple[Utterance, ...]:
    spoken: dict[str, int] = {}
    found = []
    for message in messages:
        if isinstance(message, AIMessage) and message.name:
            spoken[message.name] = spoken.get(message.name, 0) + 1
            found.append(Utterance(spoken[message.name], message.name, str(message.text)))
    return tuple(found)
