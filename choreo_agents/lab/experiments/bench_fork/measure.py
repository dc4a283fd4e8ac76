"""Forks subagents from one conversation, in every way that there is, and compares what they would say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from statistics import mean
from typing import Any, Literal, get_args

from langchain_core.messages import BaseMessage
from torch import Tensor

from choreo_agents.chat import ChatCall, ChatRequest, astreamed
from choreo_agents.engine import Decode, Engine, Memory
from choreo_agents.engine.settings import MethodName
from choreo_agents.lab.evaluation.distributions import divergence
from choreo_agents.lab.experiments.bench_fork.conversation import ForkedAgent, ForkedTalk, turn_tokens
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.training.journal import Journal, Record

Way = Literal["own prompts, fork", "own prompts, prefix cache", "same prompt, ours", "same prompt, prefix cache"]
WAYS: tuple[Way, ...] = get_args(Way)
FORK, TEXT, SAME, SAME_TEXT = WAYS
REST_S = 0.2
"""Between two runs: the threads of the one before may spin for a while."""
WARM_UP = 256
"""Tokens of the conversation of a run of each way that is not timed."""
THREAD, PARENT = "fork", "parent"
_ROUNDING = 128
"""Tokens that a message may take beyond its own."""


class WatchedCall(ChatCall):
    """A call that keeps the logits of all that it says."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.logits: list[Tensor] = []

    def asked(self, noted: dict[str, Any]) -> Any:
        decode: Decode = yield from super().asked(noted)
        return replace(decode, watch=lambda row: self.logits.append(row.float().cpu().clone()))


@dataclass(frozen=True)
class WayRun:
    """One fork of all subagents at once."""

    first_token_s: tuple[float, ...]
    """Of each subagent, from the moment of the fork."""
    tokens_encoded: int
    """Before answers: of all subagents, ..."""
    tokens_own: int
    """... of which so many are their own system prompts."""
    tokens_read: int
    """By all subagents, from caches too."""
    right: float
    """Share of the right answers' tokens that would have been chosen."""
    logits: tuple[Sequence[Tensor], ...] = field(repr=False, compare=False)
    """Of each subagent's answer, token by token: [vocabulary] each."""

    def figures(self) -> Record:
        """In JSON's types."""
        return {name: value for name, value in vars(self).items() if name != "logits"}


@dataclass(frozen=True)
class ForkLoss:
    """How far apart two ways are on the same words."""

    first_kl: float
    """Of the first token of an answer, in nats: mean over subagents."""
    kl: float
    """Of all tokens of the answers, each behind the right ones."""
    agreement: float
    """Share of tokens that both would choose."""
    tokens: int

    @staticmethod
    def between(one: WayRun, other: WayRun) -> ForkLoss:
        """From what one says to what the other does."""
        pairs = [list(zip(a, b, strict=True)) for a, b in zip(one.logits, other.logits, strict=True)]
        each = [pair for answer in pairs for pair in answer]
        return ForkLoss(
            mean(divergence(*answer[0]) for answer in pairs),
            mean(divergence(*pair) for pair in each),
            mean(bool(a.argmax() == b.argmax()) for a, b in each),
            len(each),
        )


@dataclass(frozen=True)
class ForkBench:
    """What is forked, and on what.

    Args:
        model: Serves all ways.
        tokens: Of what the parent is told, ...
        reports: ... which comes in so many messages.
        agents: How many are forked.
        seed: Of the words, which are others in each round.
    """

    model: LoadedModel
    tokens: int = 4096
    reports: int = 16
    agents: int = 8
    seed: int = 0

    def measure(self, journal: Journal, repeats: int, on_progress: Callable[[str], None] = lambda what: None) -> None:
        """Run what the journal does not hold yet: all ways in each round, the first of a round is another in the next.

        Args:
            journal: Gets a record of each round.
            repeats: Rounds.
            on_progress: Told of every run that is over, or was before.
        """
        missing = [number for number in range(repeats) if str(number) not in journal]
        for way in WAYS if missing else ():
            self.run(way, self._talk(WARM_UP, 0))
        for number in range(repeats):
            if number not in missing:
                for way in WAYS:
                    on_progress(way)
                continue
            talk, runs = self._talk(self.tokens, number), dict[Way, WayRun]()
            for place in range(len(WAYS)):
                way = WAYS[(place + number) % len(WAYS)]
                runs[way] = self.run(way, talk)
                on_progress(way)
            journal.add(str(number), {"round": number, **round_of(runs)})

    def _talk(self, tokens: int, number: int) -> ForkedTalk:
        return ForkedTalk.draw(self.model, tokens, self.reports, self.agents, f"{self.seed} {number}")

    def run(self, way: Way, talk: ForkedTalk) -> WayRun:
        """Fork once, on an engine of its own whose cache knows the parent's conversation alone."""
        time.sleep(REST_S)
        method: MethodName = "baseline" if way in (TEXT, SAME_TEXT) else "choreo"
        longest = turn_tokens(self.model, talk.system, *talk.talk) + 1024
        budget = (len(talk.agents) + 2) * (longest + _ROUNDING * len(talk.talk))
        memory = Memory(kv_budget_bytes=budget * self.model.adapter.geometry.bytes_per_token)
        with Engine.load(self.model, method=method, memory=memory) as engine:
            return asyncio.run(_forked(engine, way, talk))


def round_of(runs: Mapping[Way, WayRun]) -> Record:
    """What one round of all ways comes to."""
    return {
        "ways": {way: run.figures() for way, run in runs.items()},
        # Ours and the baseline encode the same prompt: what differs is rounding.
        "loss": asdict(ForkLoss.between(runs[FORK], runs[TEXT])),
        "rounding": asdict(ForkLoss.between(runs[SAME], runs[SAME_TEXT])),
    }


async def _forked(engine: Engine, way: Way, talk: ForkedTalk) -> WayRun:
    parent = WatchedCall(engine, [talk.system, *talk.talk], _request(engine, way, PARENT, talk.answer), THREAD)
    await _first_token(parent)
    assert parent.message is not None
    shared = [*talk.talk, parent.message]
    started, calls = time.perf_counter(), list[WatchedCall]()

    async def one(number: int, agent: ForkedAgent) -> float:
        told: list[BaseMessage] = [agent.system if way in (FORK, TEXT) else talk.system, *shared, *agent.task]
        calls.append(WatchedCall(engine, told, _request(engine, way, f"agent {number}", agent.answer), THREAD))
        return await _first_token(calls[-1]) - started

    # Tasks run in the order in which they are made until they first wait: so do their calls.
    times = await asyncio.gather(*(one(number, agent) for number, agent in enumerate(talk.agents)))
    usages = [call.message.usage_metadata for call in calls if call.message is not None]
    read = [usage["input_tokens"] for usage in usages if usage is not None]
    found = [usage["input_token_details"]["cache_read"] for usage in usages if usage is not None]
    own = sum(turn_tokens(engine.model, agent.system) for agent in talk.agents) if way in (FORK, TEXT) else 0
    right = [
        bool(row.argmax() == token)
        for agent, call in zip(talk.agents, calls, strict=True)
        for row, token in zip(call.logits, answer_tokens(engine, agent.answer), strict=True)
    ]
    logits = tuple(call.logits for call in calls)
    return WayRun(tuple(times), sum(read) - sum(found), own, sum(read), mean(right), logits)


def _request(engine: Engine, way: Way, agent: str, answer: str) -> ChatRequest:
    """Of a call that says what it is made to."""
    sampling = Sampling(forced=answer_tokens(engine, answer))
    if way != FORK:
        return ChatRequest(agent=agent, sampling=sampling)
    inherits = () if agent == PARENT else (f"{PARENT}.system",)
    return ChatRequest(agent=agent, sampling=sampling, reuse="anywhere", inherits=inherits)


def answer_tokens(engine: Engine, words: str) -> tuple[int, ...]:
    """An answer's, as they stand between the header and the end of its turn."""
    chat, model = engine.chat, engine.model
    turn, header, end = (
        model.encode(text) for text in (chat.turn("assistant", words), chat.header(None), chat.turn_end)
    )
    return tuple(turn[len(header) : len(turn) - len(end)])


async def _first_token(call: ChatCall) -> float:
    """When it says its first word; it goes on until it has said all."""
    came = 0.0
    async with aclosing(astreamed(call)) as pieces:
        async for piece in pieces:
            if not came and piece.text:
                came = time.perf_counter()
    return came
