"""One debate under one method: what was said, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage

from choreo_agents.engine import Engine, Memory
from choreo_agents.engine.settings import MethodName
from choreo_agents.engine.stock.memory_map import MemoryMap
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.graph.view.run_options import Replay
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.cases import problem
from choreo_agents.workflows.cases.answers import FIRST, read_answer
from choreo_agents.workflows.cases.debate import DebateItem
from choreo_agents.workflows.graphs.debate import debate, final_answer
from choreo_agents.workflows.phrasing import load_prompts
from choreo_agents.workflows.running import OnDecode, OnToken, RunCost, run_graph, sampled

LEAST_AGENTS = 3
"""So many have notes of what is asked, or need the record."""


@dataclass(frozen=True)
class Debated:
    """What a debate is about, and what each agent knows of it."""

    rules: str
    """The public root."""
    question: str
    answer: str
    """The right one."""
    agents: tuple[str, ...]
    notes: tuple[str, ...]
    """Each agent's private system prompt."""
    record: tuple[str, ...] = ()
    """What all of them read before they are asked; nothing, if their notes say all there is to know."""

    def is_correct(self, reply: str) -> bool:
        """Whether a reply's first sentence states the answer."""
        return read_answer(reply, FIRST) == self.answer


def problem_of(number: int, *, agents: int, reports: int) -> Debated:
    """A debate that is shipped: one agent has noted the answer, one has it wrong, others noted nothing of it.

    Args:
        number: Which of the twenty.
        agents: 3 to 8.
        reports: Of its record, that with the answer among them; 0: over notes alone.

    Raises:
        InvalidRequestError: There are fewer agents.
    """
    if agents < LEAST_AGENTS:
        raise InvalidRequestError(f"our debates are among {LEAST_AGENTS} agents or more, not {agents}")
    item, texts = problem("debate", number), load_prompts("debate", "embedded")
    assert isinstance(item, DebateItem) and item.answer is not None
    names = texts.names("agents")[:agents]
    telling = next(place for place, report in enumerate(item.record) if item.answer in report)
    others = [place for place in range(len(item.record)) if place != telling]
    record = tuple(item.record[place] for place in sorted([telling, *others][:reports]))
    return Debated(texts("system"), item.question, item.answer, names, item.notes[:agents], record)


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
    cost: RunCost
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
        state, cost = run_coroutine(run_graph(engine, graph, messages, replay=replay, **seen))
        memory = engine.kv.memory_map()
        said = sampled(engine, state)
    answer = final_answer(state["messages"], problem.agents)
    return DebateRun(_utterances(state["messages"]), answer, problem.is_correct(answer), cost, said, memory)


def _utterances(messages: list[BaseMessage]) -> tuple[Utterance, ...]:
    spoken: dict[str, int] = {}
    found = []
    for message in messages:
        if isinstance(message, AIMessage) and message.name:
            spoken[message.name] = spoken.get(message.name, 0) + 1
            found.append(Utterance(spoken[message.name], message.name, str(message.text)))
    return tuple(found)
