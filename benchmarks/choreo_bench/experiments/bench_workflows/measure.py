"""Runs every scenario on every problem under every method, taking turns; what is known already is not run again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from choreo_agents.engine import Engine, Memory
from choreo_agents.engine.settings import MethodName
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.training.journal import Journal, Record
from choreo_agents.workflows.playing import run_graph
from choreo_bench.competitors import Absent, ChatHuggingFaceDebate
from choreo_bench.experiments.bench_workflows.scenarios import (
    Instance,
    Lengths,
    ScenarioWords,
    WorkflowScenario,
    vocabulary_of,
)
from choreo_bench.timing import rest

METHODS: tuple[MethodName, ...] = ("choreo", "baseline", "naive")
CHAT = ChatHuggingFaceDebate.name
WARM_UP = Lengths(8, 8, 8)
"""Of an untimed run of each scenario and method, before its first timed one."""
OnProgress = Callable[[str], None]


def key_of(scenario: str, lengths: Lengths, problem: int, method: str) -> str:
    """Names a run in a journal."""
    return f"{scenario} | {lengths.system}/{lengths.problem}/{lengths.utterance} | {problem} | {method}"


@dataclass(frozen=True)
class WorkflowBench:
    """Runner of workflows on one model, under several methods.

    Args:
        model: Serves all.
        methods: In turn; the first of a problem is another for the next problem.
        kv_budget_bytes: Of each engine, which is a fresh one for every run.
        naive_problems: On how many of the problems `naive` runs; None: on all.
        chat: What is done today, for parallel debates; on the first `chat_problems`.
    """

    model: LoadedModel
    methods: Sequence[MethodName] = METHODS
    kv_budget_bytes: int = 4 << 30
    naive_problems: int | None = None
    chat: ChatHuggingFaceDebate | None = None
    chat_problems: int = 0

    def of(self, scenario: WorkflowScenario, problem: int) -> list[str]:
        """The methods of a problem, in the order of their turns."""
        turns = [self.methods[(place + problem) % len(self.methods)] for place in range(len(self.methods))]
        few = self.naive_problems is not None and problem >= self.naive_problems
        chats = self.chat is not None and scenario.has_chat and problem < self.chat_problems
        return [method for method in turns if not (few and method == "naive")] + [CHAT] * chats

    def run(self, method: str, instance: Instance) -> Record:
        """Run a scenario once, and return its figures."""
        rest()
        if method == CHAT:
            return self._run_chat(instance)
        name: Any = method
        with Engine.load(self.model, method=name, memory=Memory(kv_budget_bytes=self.kv_budget_bytes)) as engine:
            question = [("user", instance.question)]
            _, cost = asyncio.run(run_graph(engine, instance.graph, question, replay=instance.texts))
        return asdict(cost)

    def _run_chat(self, instance: Instance) -> Record:
        shape = instance.chat
        assert shape is not None and self.chat is not None
        run = self.chat.debate(
            shape.agents, rounds=shape.rounds, system=shape.system, question=instance.question, texts=instance.text_in
        )
        # The last token that a call decodes is never encoded.
        decoded = sum(len(tokens) - 1 for tokens in instance.texts.values())
        return {
            "ttft_s": list(run.ttft_s),
            "end_to_end_s": run.end_to_end_s,
            "tokens_encoded": sum(run.prompt_tokens) + decoded,
            "tokens_reused": 0,
            "rows_per_decode_step": 1.0,
        }


def methods_named(names: str) -> list[MethodName]:
    """Find methods by name, with commas between, in the order of `METHODS`; raises `InvalidRequestError`."""
    chosen = {name.strip() for name in names.split(",")}
    if unknown := chosen - set(METHODS):
        raise InvalidRequestError(f"unknown method {min(unknown)!r}: use some of {', '.join(METHODS)}")
    return [method for method in METHODS if method in chosen]


@contextmanager
def chat_competitor(
    model: LoadedModel, path: Path, say: Callable[[str], None], *, wanted: bool
) -> Iterator[ChatHuggingFaceDebate | None]:
    """Load the same model as a `ChatHuggingFace`, if that is wanted and can be had.

    Args:
        model: As it is served.
        path: Its folder.
        say: Told why it is not measured.
        wanted: Whether it is.
    """
    try:
        chat = ChatHuggingFaceDebate(path, model.adapter.geometry.dtype, str(model.adapter.device)) if wanted else None
    except Absent as reason:
        say(f"[yellow]not measured: {ChatHuggingFaceDebate.name}: {reason}[/]")
        chat = None
    yield chat
    if chat is not None:
        chat.close()


def measure_workflows(
    bench: WorkflowBench,
    scenarios: Sequence[WorkflowScenario],
    journal: Journal,
    *,
    problems: int,
    lengths: Lengths = Lengths(),
    on_progress: OnProgress = lambda what: None,
) -> list[Record]:
    """Run what the journal does not hold yet. All methods say the same, at full price.

    Args:
        bench: What runs.
        scenarios: Of what size.
        journal: Gets a record of each run.
        problems: How many different ones.
        lengths: Of prompts and utterances.
        on_progress: Told of every run that is over, or was before.

    Returns:
        The records of these runs: a journal may hold more.
    """
    records: list[Record] = []
    vocabulary = vocabulary_of(bench.model)
    warm: set[tuple[str, str]] = set()
    for problem in range(problems):
        for scenario in scenarios:
            for method in bench.of(scenario, problem):
                key = key_of(scenario.name, lengths, problem, method)
                if key not in journal:
                    if (scenario.name, method) not in warm:
                        bench.run(method, scenario.build(ScenarioWords(vocabulary, WARM_UP, problem)))
                        warm.add((scenario.name, method))
                    figures = bench.run(method, scenario.build(ScenarioWords(vocabulary, lengths, problem)))
                    named = {"scenario": scenario.name, "problem": problem, "method": method}
                    journal.add(key, {**named, "lengths": asdict(lengths), **figures})
                records.append(journal.records[key])
                on_progress(key)
    return records
