"""Runs every scenario on every problem under every method, taking turns; what is known already is not run again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from choreo_agents.bench.journal import Journal
from choreo_agents.bench.rivals import ChatHuggingFaceDebate
from choreo_agents.bench.running import RunCost, run_graph
from choreo_agents.bench.workflows.scenarios import Lengths, Scenario, Words
from choreo_agents.engine import Engine
from choreo_agents.engine.methods import MethodName
from choreo_agents.models import LoadedModel

REST_S = 0.2
"""Between two runs: the threads of the one before may spin for a while."""
METHODS: tuple[MethodName, ...] = ("choreo", "baseline", "naive")
CHAT = ChatHuggingFaceDebate.name
OnProgress = Callable[[str], None]


def key_of(scenario: str, lengths: Lengths, problem: int, method: str) -> str:
    """Names a run in a journal."""
    return f"{scenario} | {lengths.system}/{lengths.problem}/{lengths.utterance} | {problem} | {method}"


def measure_workflows(
    model: LoadedModel,
    scenarios: Sequence[Scenario],
    journal: Journal,
    *,
    problems: int,
    lengths: Lengths = Lengths(),
    methods: Sequence[MethodName] = METHODS,
    naive_problems: int | None = None,
    chat: ChatHuggingFaceDebate | None = None,
    chat_problems: int = 0,
    kv_budget_bytes: int = 1 << 30,
    on_progress: OnProgress = lambda what: None,
) -> None:
    """Run what the journal does not hold yet. Each run has a fresh engine, and all say the same, at full price.

    Args:
        model: Serves all.
        scenarios: Of what size.
        journal: Gets a record of each run.
        problems: How many different ones.
        lengths: Of prompts and utterances.
        methods: In turn; the first of a problem is another for the next problem.
        naive_problems: On how many of the problems `naive` runs; by default on all.
        chat: What is done today, for parallel debates; on the first `chat_problems`.
        kv_budget_bytes: Of each engine.
        on_progress: Told of every run that is over, or was before.
    """
    warm = False
    for problem in range(problems):
        for scenario in scenarios:
            for place in range(len(methods)):
                method = methods[(place + problem) % len(methods)]
                key = key_of(scenario.name, lengths, problem, method)
                if method == "naive" and naive_problems is not None and problem >= naive_problems:
                    continue
                if key not in journal:
                    if not warm:
                        _run(model, scenario, Lengths(8, 8, 8), 0, method, kv_budget_bytes)
                        warm = True
                    cost = _run(model, scenario, lengths, problem, method, kv_budget_bytes)
                    record = {
                        "scenario": scenario.name,
                        "problem": problem,
                        "method": method,
                        "lengths": asdict(lengths),
                    }
                    journal.add(key, {**record, **asdict(cost)})
                on_progress(key)
            key = key_of(scenario.name, lengths, problem, CHAT)
            if chat is not None and scenario.has_chat and problem < chat_problems:
                if key not in journal:
                    record = {"scenario": scenario.name, "problem": problem, "method": CHAT, "lengths": asdict(lengths)}
                    journal.add(key, {**record, **_run_chat(model, scenario, lengths, problem, chat)})
                on_progress(key)


def _run_chat(
    model: LoadedModel, scenario: Scenario, lengths: Lengths, problem: int, chat: ChatHuggingFaceDebate
) -> dict[str, Any]:
    instance = scenario.build(model, Words(model, lengths, problem))
    shape = instance.chat
    assert shape is not None
    time.sleep(REST_S)
    run = chat.debate(
        shape.agents, rounds=shape.rounds, system=shape.system, question=instance.question, said=instance.said_in
    )
    decoded = run.calls * lengths.utterance
    return {
        "ttft_s": list(run.ttft_s),
        "end_to_end_s": run.end_to_end_s,
        "tokens_encoded": sum(run.prompt_tokens) + decoded,
        "tokens_reused": 0,
        "rows_per_decode_step": 1.0,
    }


def _run(
    model: LoadedModel, scenario: Scenario, lengths: Lengths, problem: int, method: MethodName, kv_budget_bytes: int
) -> RunCost:
    instance = scenario.build(model, Words(model, lengths, problem))
    with Engine.load(model, method=method, kv_budget_bytes=kv_budget_bytes) as engine:
        time.sleep(REST_S)
        replay, question = instance.said, [("user", instance.question)]
        _, cost = asyncio.run(run_graph(engine, instance.graph, question, replay=replay))
    return cost
