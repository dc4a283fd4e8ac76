"""Runs a team in every way, taking turns, on the same words."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Literal, get_args

from langchain_core.messages import AIMessage, BaseMessage

from choreo_agents.chat import ChatCall, ChatRequest, streamed
from choreo_agents.engine import Engine, Memory
from choreo_agents.graph import RunOptions
from choreo_agents.lab.experiments.bench_porting.ported_team import team as ported_team
from choreo_agents.lab.experiments.bench_porting.words import InTurn, TeamLengths, TeamWords
from choreo_agents.lab.rivals import ForcedChatHuggingFace
from choreo_agents.lab.rivals.stock_team import memory
from choreo_agents.lab.rivals.stock_team import team as stock_team
from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling

Way = Literal["ChatHuggingFace", "ChatChoreo", "our nodes"]
WAYS: tuple[Way, ...] = get_args(Way)
REST_S = 0.2
"""Between two runs: the threads of the one before may spin for a while."""
WARM_UP = TeamLengths(1, 8, 8, 8)
"""Of an untimed run in each way."""
THREAD = "1"


@dataclass(frozen=True)
class TeamRun:
    """What one run cost."""

    ttft_s: tuple[float, ...]
    """Of each call: from its node's start to its first token."""
    end_to_end_s: float
    """From the first question to the last answer."""
    tokens_encoded: int
    tokens_reused: int


@dataclass(frozen=True)
class WayFigures:
    """Of all runs in one way: counts are every run's, times are medians."""

    way: Way
    calls: int
    tokens_encoded: int
    tokens_reused: int
    ttft_s: float
    """The mean of a run's calls."""
    end_to_end_s: float

    @classmethod
    def of(cls, way: Way, runs: Sequence[TeamRun]) -> WayFigures:
        """Of runs that took the same counts, as they do with words of one length."""
        first = runs[0]
        return cls(
            way,
            len(first.ttft_s),
            first.tokens_encoded,
            first.tokens_reused,
            median(mean(run.ttft_s) for run in runs),
            median(run.end_to_end_s for run in runs),
        )


class ForcedChatChoreo:
    """What `ChatChoreo` does for a program that calls its model in a known order.

    Args:
        engine: Serves it.
        said: The tokens of each call.
    """

    def __init__(self, engine: Engine, said: Sequence[Sequence[int]]) -> None:
        self._engine, self._said = engine, list(said)
        self.ttft_s: list[float] = []
        self.prompts: list[tuple[int, ...]] = []
        """Of each call."""

    def invoke(self, messages: Sequence[BaseMessage]) -> AIMessage:
        """The next answer."""
        started = time.perf_counter()
        asked = ChatRequest(sampling=Sampling(forced=tuple(self._said.pop(0))))
        call = ChatCall(self._engine, messages, asked, THREAD)
        pieces = streamed(call)
        next(pieces)
        self.ttft_s.append(time.perf_counter() - started)
        for _ in pieces:
            pass
        self.prompts.append(tuple(call.prompt()))
        assert call.message is not None, "it was heard to its end"
        return call.message


class PortingBench:
    """Three ways to run one team.

    Args:
        model: Serves two of them.
        rival: Serves the third; None: it is absent.
        kv_budget_bytes: Of each engine, which is a fresh one for every run.
    """

    def __init__(self, model: LoadedModel, rival: ForcedChatHuggingFace | None, kv_budget_bytes: int = 1 << 30) -> None:
        self.model, self.rival, self._budget = model, rival, kv_budget_bytes

    @property
    def ways(self) -> list[Way]:
        return [way for way in WAYS if way != "ChatHuggingFace" or self.rival is not None]

    def run(self, way: Way, words: TeamWords) -> TeamRun:
        """One run's figures."""
        time.sleep(REST_S)
        if way == "ChatHuggingFace":
            return self._stock(words)
        with Engine.load(self.model, memory=Memory(kv_budget_bytes=self._budget)) as engine:
            return self._one_line(engine, words) if way == "ChatChoreo" else self._ported(engine, words)

    def _stock(self, words: TeamWords) -> TeamRun:
        assert self.rival is not None
        said = [tokens for _, tokens in words.calls]
        self.rival.say(said)
        app = stock_team(self.rival, words.told).compile(checkpointer=memory())
        elapsed = _asked(app, words, {})
        # The last token that a call decodes is never encoded.
        encoded = sum(map(len, self.rival.prompts)) + sum(len(tokens) - 1 for tokens in said)
        return TeamRun(tuple(self.rival.ttft_s), elapsed, encoded, 0)

    def _one_line(self, engine: Engine, words: TeamWords) -> TeamRun:
        chat = ForcedChatChoreo(engine, [tokens for _, tokens in words.calls])
        app = stock_team(chat, words.told).compile(checkpointer=memory())
        elapsed = _asked(app, words, {})
        stats = engine.stats()
        return TeamRun(tuple(chat.ttft_s), elapsed, stats.tokens_encoded, stats.tokens_reused)

    def _ported(self, engine: Engine, words: TeamWords) -> TeamRun:
        app = ported_team(words.told).compile(engine=engine, checkpointer=memory())
        waits: list[float] = []
        options = {"choreo": RunOptions(replay=InTurn(words))}
        elapsed = _asked(app, words, options, lambda told: waits.append(told["ttft_s"]))
        stats = engine.stats()
        return TeamRun(tuple(waits), elapsed, stats.tokens_encoded, stats.tokens_reused)


def _asked(
    app: Any, words: TeamWords, options: dict[str, Any], on_call: Callable[[Any], None] = lambda told: None
) -> float:
    """Ask all questions in one thread; the seconds that it takes."""
    config = {"configurable": {"thread_id": THREAD, **options}, "recursion_limit": 100}
    started = time.perf_counter()
    for task in words.tasks:
        for told in app.stream({"messages": [("user", task)]}, config, stream_mode="custom"):
            on_call(told)
    return time.perf_counter() - started


def measure_porting(
    bench: PortingBench,
    *,
    runs: int,
    lengths: TeamLengths = TeamLengths(),
    on_progress: Callable[[str], None] = lambda what: None,
) -> list[WayFigures]:
    """All ways on the same words, the first of a run being another for the next.

    Args:
        bench: What runs.
        runs: In each way, after one that is not counted.
        lengths: Of prompts and answers.
        on_progress: Told of every run that is over.
    """
    found: dict[Way, list[TeamRun]] = {way: [] for way in bench.ways}
    for way in bench.ways:
        bench.run(way, TeamWords(bench.model, WARM_UP, -1))
        on_progress(way)
    for number in range(runs):
        words = TeamWords(bench.model, lengths, number)
        for place in range(len(found)):
            way = bench.ways[(place + number) % len(found)]
            found[way].append(bench.run(way, words))
            on_progress(way)
    return [WayFigures.of(way, made) for way, made in found.items()]
