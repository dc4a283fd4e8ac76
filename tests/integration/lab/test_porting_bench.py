"""`choreo bench porting`: what a team encodes in each way, counted a second time; times are for elsewhere."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_choreo import ChatChoreo
from langchain_core.messages import AIMessage, BaseMessage
from typer.testing import CliRunner

from choreo_agents import Engine
from choreo_agents.cli import app
from choreo_agents.lab.experiments.bench_porting.measure import ForcedChatChoreo, PortingBench, measure_porting
from choreo_agents.lab.experiments.bench_porting.ported_team import team as ported_team
from choreo_agents.lab.experiments.bench_porting.report import lines_changed
from choreo_agents.lab.experiments.bench_porting.words import TEAM, TeamLengths, TeamWords
from choreo_agents.lab.rivals import ForcedChatHuggingFace
from choreo_agents.lab.rivals.stock_team import team as stock_team
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.models.embedded import WEIGHTS

LENGTHS = TeamLengths(turns=2, system=9, task=20, utterance=10)
CALLS = 12


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("embedded")


@pytest.fixture(scope="module")
def words(model: LoadedModel) -> TeamWords:
    return TeamWords(model, LENGTHS, 0)


def run_stock(chat: Any, words: TeamWords) -> list[BaseMessage]:
    """The messages of the stock program, without a checkpointer."""
    graph, talk = stock_team(chat, words.told).compile(), []
    for task in words.tasks:
        talk = graph.invoke({"messages": [*talk, ("user", task)]})["messages"]
    return talk


def different(texts: Iterable[Sequence[int]], starts: Container[int]) -> int:
    """Tokens that a cache of prefixes encodes, turn by turn: those of turns that have not stood behind the same."""
    known: dict[tuple[int, ...], int] = {}
    for text in texts:
        cuts = [place for place, token in enumerate(text) if token in starts] + [len(text)]
        for begin, end in pairwise(cuts if cuts[0] == 0 else [0, *cuts]):
            known[tuple(text[:end])] = end - begin
    return sum(known.values())


def test_one_changed_line_encodes_what_no_prefix_has_and_our_nodes_encode_everything_once(
    model: LoadedModel, words: TeamWords
) -> None:
    with Engine.load(model) as engine:
        chat = ForcedChatChoreo(engine, [tokens for _, tokens in words.calls])
        talk = run_stock(chat, words)
        end, prompts = model.encode(engine.chat.turn_end), chat.prompts
        answers = [[*tokens, *end] for _, tokens in words.calls]
        heard = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        starts = {model.encode(engine.chat.turn(role, ""))[0] for role in ("system", "user", "assistant")}
        assert engine.stats().tokens_encoded == different(heard, starts)
    assert [message.text.partition(":")[0] for message in talk[1::4] + talk[2::4]] == ["Alice"] * 2 + ["Bruno"] * 2

    bench = PortingBench(model, None, 1 << 25)
    one_line, ours = (bench.run(way, words) for way in bench.ways)
    assert len(one_line.ttft_s) == len(ours.ttft_s) == CALLS
    assert one_line.tokens_encoded == different(heard, starts)
    # Each text once: its own words, and what stands around a turn.
    with Engine.load(model) as engine:
        chat_format = engine.chat
        once = [chat_format.turn("system", told) for told in words.told.values()]
        once += [chat_format.turn("user", task) for task in words.tasks]
        headers = [model.encode(chat_format.header(name)) for name, _ in words.calls]
        root = ours.tokens_encoded - sum(len(model.encode(turn)) for turn in once)
        root -= sum(len(header) + len(answer) for header, answer in zip(headers, answers, strict=True))
    assert 0 <= root <= 1, "a token that starts the text"
    # The conversation is read by four, who have no prefix in common.
    assert (sum(map(len, prompts)), one_line.tokens_encoded, ours.tokens_encoded) == (960, 529, 263)


def test_a_stock_program_is_sent_and_says_the_same_in_both(words: TeamWords, model: LoadedModel) -> None:
    pytest.importorskip("langchain_huggingface")
    said = [tokens for _, tokens in words.calls]
    rival = ForcedChatHuggingFace(WEIGHTS, torch.float32)
    rival.say(said)
    stock = run_stock(rival, words)
    with Engine.load(model) as engine:
        chat = ForcedChatChoreo(engine, said)
        changed = run_stock(chat, words)
    assert rival.prompts == chat.prompts and len(rival.ttft_s) == CALLS
    assert [(each.type, each.name, each.text) for each in stock] == [
        (each.type, each.name, each.text) for each in changed
    ]
    figures = measure_porting(PortingBench(model, rival, 1 << 25), runs=1, lengths=LENGTHS)
    assert [each.way for each in figures] == ["ChatHuggingFace", "ChatChoreo", "our nodes"]
    assert figures[0].tokens_encoded == sum(map(len, chat.prompts)) + sum(len(tokens) - 1 for tokens in said)
    assert [each.calls for each in figures] == [CALLS] * 3


def test_the_program_runs_over_the_chat_model_itself(model: LoadedModel, words: TeamWords) -> None:
    with Engine.load(model) as engine:
        chat, sent, routes = ChatChoreo(engine=engine, max_tokens=4), [], iter(["Alice", "Bruno", "Clara"] * 2)

        class Routed:
            """The model routes as it can, which an untold one cannot."""

            def invoke(self, messages: list[BaseMessage]) -> AIMessage:
                said = chat.invoke(messages)
                sent.append(said)
                return AIMessage(next(routes)) if messages[0].text == words.told["supervisor"] else said

        assert len(run_stock(Routed(), words)) == 8
        found = [each.usage_metadata["input_token_details"]["cache_read"] for each in sent]
        engine.check()
    # Everyone but a newcomer finds the prompt of his last call; a supervisor has spoken twice before the second turn.
    assert [tokens > LENGTHS.system for tokens in found] == [False, False, True, False, True, False] + [True] * 6


def test_our_team_sees_what_the_stock_one_is_sent(words: TeamWords) -> None:
    report = ported_team(words.told).audit()
    attended = {(each.context, each.reader) for each in report.findings if each.channel == "encoding"}
    others = {(f"{one}.system", other) for one in TEAM[1:] for other in TEAM if one != other}
    assert attended == others, "they read what was said with an own system prompt; of the supervisor nothing is read"


def test_lines_are_counted() -> None:
    stock, one, ours = (lines_changed(way) for way in ("ChatHuggingFace", "ChatChoreo", "our nodes"))
    assert (stock.new, stock.gone, one.new, one.gone) == (0, 0, 1, 1)
    assert ours.new < ours.gone < 20


def test_the_command_shows_and_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("choreo_agents.lab.rivals.chat_hugging_face.find_spec", lambda name: None)
    page = tmp_path / "porting.md"
    lengths = [word for name, of in vars(LENGTHS).items() for word in (f"--{name}", str(of))]
    command = ["bench", "porting", "--model", "embedded", "--n", "1", *lengths]
    result = CliRunner().invoke(app, [*command, "--report", str(page), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{\n") :])
    assert [each["way"] for each in found["ways"]] == ["ChatChoreo", "our nodes"]
    assert f"`choreo {' '.join(command)} --threads 1`" in page.read_text()
    assert "not measured: ChatHuggingFace: langchain-huggingface is not installed" in result.output
