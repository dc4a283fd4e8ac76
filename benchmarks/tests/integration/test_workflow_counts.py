"""What the benchmark's workflows encode: counts, which no machine changes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from choreo_bench.experiments.bench_workflows.scenarios import (
    Instance,
    Lengths,
    ScenarioWords,
    WorkflowScenario,
    debate_in_turns,
    parallel_debate,
    tree,
    vocabulary_of,
)

from choreo_agents.engine import Engine, Memory
from choreo_agents.graph import START
from choreo_agents.models import LoadedModel
from choreo_agents.workflows.playing import RunCost, run_graph

LENGTHS = Lengths(system=5, problem=7, utterance=6)
SCENARIOS = (parallel_debate(), debate_in_turns(), tree(3, 2), tree(3, 2, critics=True))
METHODS = ("choreo", "baseline", "naive")
Runs = Mapping[str, tuple[Instance, Mapping[str, Any], RunCost]]


def runs(model: LoadedModel, scenario: WorkflowScenario, lengths: Lengths = LENGTHS) -> Runs:
    """By method: what was to be said, the end state, and the cost."""
    found = {}
    for method in METHODS:
        instance = scenario.build(ScenarioWords(vocabulary_of(model), lengths, 0))
        with Engine.load(model, method=method, memory=Memory(kv_budget_bytes=1 << 27)) as engine:
            question = [("user", instance.question)]
            state, cost = asyncio.run(run_graph(engine, instance.graph, question, replay=instance.texts))
        found[method] = instance, state, cost
    return found


@pytest.fixture(scope="module", params=SCENARIOS, ids=lambda scenario: scenario.name)
def played(request: pytest.FixtureRequest, embedded: LoadedModel) -> Runs:
    return runs(embedded, request.param)


def test_choreo_encodes_least_and_naive_most(played: Runs) -> None:
    choreo, baseline, naive = (played[method][2] for method in METHODS)
    assert choreo.tokens_encoded < baseline.tokens_encoded < naive.tokens_encoded
    assert naive.tokens_reused == 0 and choreo.tokens_reused > 0 and baseline.tokens_reused > 0
    assert len(choreo.ttft_s) == len(baseline.ttft_s) == len(naive.ttft_s)
    assert baseline.tokens_encoded + baseline.tokens_reused == naive.tokens_encoded


def test_all_methods_read_the_same(played: Runs) -> None:
    """Of each call what it encodes and what it reuses is its prompt; choreo also encodes the end of what it says."""
    sums = {method: cost.tokens_encoded + cost.tokens_reused for method, (_, _, cost) in played.items()}
    last_token_and_turn_end = 2
    ends = len(played["choreo"][2].ttft_s) * last_token_and_turn_end
    assert sums["choreo"] - ends == sums["baseline"] == sums["naive"]


def test_all_methods_say_what_they_are_told(played: Runs, embedded: LoadedModel) -> None:
    spoken = []
    for instance, state, cost in played.values():
        calls = [call for call in state["handles"] if call["author"] in instance.graph.nodes]
        words = {message.id: message.text for message in state["messages"]}
        said = [(call["author"], words[call["message_id"]]) for call in calls]
        told = [(call[0], embedded.decode(list(tokens)).strip()) for call, tokens in instance.texts._said.items()]
        assert sorted(said) == sorted(told) and len(cost.ttft_s) == len(said)
        assert {len(tokens) for tokens in instance.texts._said.values()} == {LENGTHS.utterance}
        assert len(set(instance.texts._said.values())) > 1
        spoken.append(said)
    assert spoken[0] == spoken[1] == spoken[2]


@pytest.mark.parametrize(
    ("scenario", "calls"),
    [
        (parallel_debate(), 3 * 3),
        (parallel_debate(2, 4), 2 * 4),
        (debate_in_turns(2), 3 * 2),
        (tree(3, 2), 3 + 2 + 1),
        (tree(2, 3, critics=True), 2 + 3 + 1),
    ],
    ids=lambda each: getattr(each, "name", str(each)),
)
def test_as_many_calls_as_the_size_says(embedded: LoadedModel, scenario: WorkflowScenario, calls: int) -> None:
    instance = scenario.build(ScenarioWords(vocabulary_of(embedded), LENGTHS, 0))
    with Engine.load(embedded, memory=Memory(kv_budget_bytes=1 << 27)) as engine:
        question = [("user", instance.question)]
        _, cost = asyncio.run(run_graph(engine, instance.graph, question, replay=instance.texts))
    assert len(cost.ttft_s) == len(instance.texts) == calls


def test_choreo_encodes_every_turn_of_a_parallel_debate_once(embedded: LoadedModel) -> None:
    instance, state, cost = runs(embedded, parallel_debate(2, 3))["choreo"]
    assert instance.chat is not None

    def count(text: str) -> int:
        return len(embedded.encode(text))

    with Engine.load(embedded, memory=Memory(kv_budget_bytes=1 << 24)) as engine:
        chat = engine.chat
    once = count(chat.root(instance.chat.system).text) + count(chat.turn("user", instance.question).text)
    turn = LENGTHS.utterance + count(chat.turn_end)
    spoken = sum(3 * (count(chat.header(agent).text) + turn) for agent in instance.chat.agents)
    assert cost.tokens_encoded == once + spoken
    assert [entry["author"] for entry in state["handles"]].count(START) == 1


def test_texts_have_the_length_that_is_asked_for(embedded: LoadedModel) -> None:
    known = vocabulary_of(embedded)
    words = ScenarioWords(known, LENGTHS, 3)
    for tokens in (1, 2, 17, 64):
        text = words.text("name", tokens)
        assert len(embedded.encode(f" {text}")) == tokens
        assert text == ScenarioWords(known, LENGTHS, 3).text("name", tokens)
        if tokens > 2:
            assert text not in (words.text("other", tokens), ScenarioWords(known, LENGTHS, 4).text("name", tokens))
    assert len(embedded.encode(f" {words.problem()}")) == LENGTHS.problem
    assert len(embedded.encode(f" {words.system('x')}")) == LENGTHS.system
