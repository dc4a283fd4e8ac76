"""`choreo bench fork`: what each way encodes, counted, and what it changes; times are for elsewhere."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from typer.testing import CliRunner

from choreo_agents.chat import ChatCall, ChatRequest
from choreo_agents.cli import app
from choreo_agents.engine import Engine, Memory
from choreo_agents.graph import START
from choreo_agents.lab.experiments.audit_edges.measure import read_inputs, shared_edges
from choreo_agents.lab.experiments.bench_fork import measure as module
from choreo_agents.lab.experiments.bench_fork.conversation import ForkedTalk, turn_tokens
from choreo_agents.lab.experiments.bench_fork.graph import PARENT, SUBAGENTS, graph
from choreo_agents.lab.experiments.bench_fork.measure import (
    FORK,
    SAME,
    SAME_TEXT,
    TEXT,
    WAYS,
    ForkBench,
    ForkLoss,
    Way,
    WayRun,
    answer_tokens,
    round_of,
)
from choreo_agents.lab.experiments.bench_fork.report import SOONER_AT, ForkingReport, as_markdown
from choreo_agents.models import LoadedModel
from choreo_agents.training.journal import Journal, read_journal

INPUTS = Path(__file__).parents[3] / "examples" / "data" / "forks.jsonl"
PAGES = Path(__file__).parents[3] / "docs" / "benchmarks"
SIZES = ["--tokens", "60", "--messages", "2", "--subagents", "2"]


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST_S", 0.0)


@pytest.fixture(scope="module")
def talk(embedded: LoadedModel) -> ForkedTalk:
    return ForkedTalk.draw(embedded, 120, 3, 3, "0")


@pytest.fixture(scope="module")
def runs(embedded: LoadedModel, talk: ForkedTalk) -> dict[Way, WayRun]:
    return {way: ForkBench(embedded).run(way, talk) for way in WAYS}


def prompts(model: LoadedModel, talk: ForkedTalk, way: Way) -> list[list[int]]:
    """What the parent reads and says, and then what each subagent reads."""
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 20)) as engine:
        header, end = (len(model.encode(text)) for text in (engine.chat.header(None), engine.chat.turn_end))
        answer = AIMessage(talk.answer)
        # What is said last nobody has read.
        parent = ChatCall(engine, [talk.system, *talk.talk, answer], ChatRequest()).prompt()[: -header - end - 1]
        told = [
            [agent.system if way == TEXT else talk.system, *talk.talk, answer, *agent.task] for agent in talk.agents
        ]
        return [parent, *(ChatCall(engine, each, ChatRequest()).prompt() for each in told)]


def begins_alike(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_a_fork_encodes_own_prompts_and_tasks_alone(
    embedded: LoadedModel, talk: ForkedTalk, runs: dict[Way, WayRun]
) -> None:
    header = len(embedded.encode(embedded.chat.header(None)))
    tasks = sum(turn_tokens(embedded, *agent.task) + header for agent in talk.agents)
    own = sum(turn_tokens(embedded, agent.system) for agent in talk.agents)
    assert (runs[FORK].tokens_encoded, runs[FORK].tokens_own) == (own + tasks, own)
    assert (runs[SAME].tokens_encoded, runs[SAME].tokens_own) == (tasks, 0), "as if they were told alike"
    assert runs[FORK].tokens_read == runs[TEXT].tokens_read == sum(map(len, prompts(embedded, talk, TEXT)[1:]))


@pytest.mark.parametrize("way", [TEXT, SAME_TEXT])
def test_a_prefix_cache_finds_what_begins_alike(
    embedded: LoadedModel, talk: ForkedTalk, runs: dict[Way, WayRun], way: Way
) -> None:
    known, *asked = prompts(embedded, talk, way)
    before, found = [known], 0
    for each in asked:
        found += max(begins_alike(each, other) for other in before)
        before.append(each)
    assert runs[way].tokens_encoded == runs[way].tokens_read - found
    assert (found > len(known)) == (way == SAME_TEXT)


@pytest.mark.parametrize("way", [FORK, SAME])
def test_what_is_counted_is_what_the_engine_has_encoded(embedded: LoadedModel, talk: ForkedTalk, way: Way) -> None:
    with Engine.load(embedded, memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        run = asyncio.run(module._forked(engine, way, talk))
        parent = turn_tokens(embedded, talk.system, *talk.talk) + len(embedded.encode(engine.chat.bos))
        header, end = (len(embedded.encode(text)) for text in (engine.chat.header(None), engine.chat.turn_end))
        answers = [talk.answer, *(agent.answer for agent in talk.agents)]
        said = sum(len(answer_tokens(engine, each)) + end for each in answers)
        assert engine.stats().tokens_encoded == parent + header + run.tokens_encoded + said
        assert engine.stats().tokens_recomputed == 0


def test_the_loss_is_that_of_the_same_words(runs: dict[Way, WayRun]) -> None:
    found = round_of(runs)
    loss, rounding = found["loss"], found["rounding"]
    assert loss["tokens"] == rounding["tokens"] > 10
    # The square of what logits of fp32 differ by; a loss is of what was attended to.
    assert rounding["kl"] < 1e-9 < loss["kl"] < 0.1
    same = ForkLoss.between(runs[FORK], runs[FORK])
    assert (same.first_kl, same.kl, same.agreement) == (0.0, 0.0, 1.0)
    assert runs[FORK].right > 0.9, "it answers from what its parent was told, and it alone"


def test_a_conversation_is_as_long_as_asked(embedded: LoadedModel) -> None:
    talk = ForkedTalk.draw(embedded, 700, 2, 3, "0")
    told = talk.talk[:2]
    assert 700 <= turn_tokens(embedded, *told) < 720
    assert talk == ForkedTalk.draw(embedded, 700, 2, 3, "0") != ForkedTalk.draw(embedded, 700, 2, 3, "1")
    assert len({agent.system.text for agent in talk.agents}) == 3
    shortest = ForkedTalk.draw(embedded, 1, 1, 1, "0")
    assert [str(each.text) for each in shortest.talk[1:]] == [str(shortest.agents[0].task[-1].text)]
    words = " ".join(str(each.text) for each in told)
    assert all(agent.answer in words for agent in talk.agents)


def test_rounds_that_are_known_do_not_run_again(embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Way] = []
    measured = ForkBench.run
    monkeypatch.setattr(ForkBench, "run", lambda self, way, talk: ran.append(way) or measured(self, way, talk))
    bench, journal, told = ForkBench(embedded, 30, 2, 2), Journal(None, {}), list[str]()
    bench.measure(journal, 1, told.append)
    assert ran == [*WAYS, *WAYS] and told == list(WAYS), "the first time not timed"
    ran.clear()
    bench.measure(journal, 2, told.append)
    assert ran == [*WAYS, *WAYS[1:], WAYS[0]], "each round starts with another"
    ran.clear()
    bench.measure(journal, 2)
    assert not ran


def record(fork: float, text: float, encoded: int) -> dict[str, Any]:
    def run(seconds: float, tokens: int, own: int = 0) -> dict[str, Any]:
        return {"first_token_s": [seconds, 3 * seconds], "tokens_encoded": tokens, "tokens_own": own} | {"right": 1.0}

    loss = {"first_kl": 0.5, "kl": 0.25, "agreement": 0.9, "tokens": 4}
    ways = {FORK: run(fork, encoded, 40), TEXT: run(text, 900, 40), SAME: run(1.0, 100), SAME_TEXT: run(1.0, 80)}
    return {"ways": ways, "loss": loss, "rounding": loss}


def test_bars_are_of_medians_and_leave_own_prompts_out() -> None:
    settings = {"model": "smollm2-135m", "dtype": "fp32", "threads": 1, "device": "cpu", "messages": 1, **SOONER_AT}
    rounds = [record(1.0, 4.0, 140), record(2.0, 12.0, 140), record(3.0, 99.0, 140)]
    report = ForkingReport(settings, rounds)
    assert [(bar.found, bar.met) for bar in report.bars()] == [(1.0, True), (1.25, False), (6.0, True)]
    lines = report.lines()
    assert lines[1].startswith("missed:") and "6.00x sooner" in lines[3] and "a token of 12" in lines[4]
    smaller = ForkingReport({**settings, "tokens": 9}, rounds)
    assert len(smaller.bars()) == 2 and "6.00x sooner" in smaller.lines()[2]


def test_the_command_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, page = tmp_path / "rounds.jsonl", tmp_path / "fork.md"
    command = ["bench", "fork", "--model", "embedded", "--dtype", "fp32", *SIZES, "--repeats", "1", "--out", str(out)]
    result = CliRunner().invoke(app, [*command, "--report", str(page)], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and FORK in result.output and "loss, from the fork" in result.output
    assert page.read_text().startswith(
        "`choreo bench fork --model embedded --dtype fp32 --subagents 2 --tokens 60 --messages 2 --repeats 1 --seed 0 "
        "--threads 1`"
    )
    monkeypatch.setattr(ForkBench, "run", None)
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert found["settings"]["subagents"] == 2 and [bar["wanted"] for bar in found["bars"]] == [1.1, 1.1]
    assert len(found["rounds"]) == 1 and found["rounds"][0]["ways"].keys() == set(WAYS)
    assert as_markdown(ForkingReport(found["settings"], found["rounds"]), "c") in page.read_text().replace(
        page.read_text().splitlines()[0], "`c`"
    )


@pytest.mark.parametrize("name", ["fork-smollm2-135m", "fork-embedded"])
def test_the_page_has_the_tables_of_its_rounds(name: str) -> None:
    page, raw = PAGES / "fork.md", PAGES / f"{name}.jsonl"
    settings = json.loads(raw.read_text().splitlines()[0])["settings"]
    lines = as_markdown(ForkingReport(settings, [*read_journal(raw).values()]), "").splitlines()[1:]
    assert len(lines) > 10 and "\n".join(lines) in page.read_text()


def test_a_conversation_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForkBench, "run", None)
    result = CliRunner().invoke(app, ["bench", "fork", "--model", "embedded"], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "give fewer --tokens" in result.output


def test_the_same_fork_as_a_graph_is_measured_by_its_edges() -> None:
    edges = {(START, name) for name in SUBAGENTS} | {(PARENT, name) for name in SUBAGENTS}
    assert set(shared_edges(graph())) == edges
    inputs = read_inputs(INPUTS)
    assert len(inputs) == 12
    assert all(each.systems.keys() == each.state["tasks"].keys() == set(SUBAGENTS) for each in inputs)
