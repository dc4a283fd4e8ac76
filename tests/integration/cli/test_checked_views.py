"""What `choreo models check` says that agents read is what a graph shows them, message by message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from support.templates import TEMPLATES, tokenizer_for
from support.tiny import save_tiny_llama

from choreo_agents import END, START, Agent, ChoreoGraph, Engine, Memory, RunOptions
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.models.checking.rendering import view_messages
from choreo_agents.models.checking.talk import ANN, ANN_AGAIN, BOB, CAROL, PUBLIC, QUESTION, TalkTurn, View, views
from choreo_agents.testing import Script

SPEAKERS: Mapping[str, TalkTurn] = {"Ann": ANN, "Bob": BOB, "Carol": CAROL, "again": ANN_AGAIN}
"""What each node says."""
VIEWS = dict(zip(SPEAKERS, range(4), strict=True))
"""Which view of the talk each node has."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    @cache
    def loaded(family: str) -> LoadedModel:
        tokenizer = tokenizer_for(family)
        folder = tmp_path_factory.mktemp("family")
        sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 1, "max_position_embeddings": 4096}
        save_tiny_llama(folder, tokenizer=tokenizer, **sizes)
        return load_model(folder, chat={"date": "2026-11-23"})

    return loaded


class Says(Mapping[tuple[str, int, int, int], Any]):
    """The talk, in a model's own tokens: with its thoughts, where it thinks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __iter__(self) -> Iterator[tuple[str, int, int, int]]:
        return iter(())

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: tuple[str, int, int, int]) -> tuple[int, ...]:
        said, chat, encode = SPEAKERS[key[0]], self._engine.chat, self._engine.model.encode
        if chat.thoughts is None or not chat.thoughts.usual:
            return tuple(encode(f" {said.words}"))
        return (*encode(said.thoughts), *encode(chat.thoughts.close + f"{said.name}:"), *encode(f" {said.words}"))


def talk(mode: str) -> ChoreoGraph:
    """The three agents, and the first of them once more."""
    told = {view.reader: view.instructions[1] for view in views()[:3]}
    graph = ChoreoGraph(system=PUBLIC)
    for node, said in SPEAKERS.items():
        graph.add_node(node, Agent(said.name, system=told[said.name], persona=said.name))
        for earlier in [*SPEAKERS][: VIEWS[node]]:
            if SPEAKERS[earlier].name != said.name:
                graph.set_visibility(earlier, node, mode=mode)
        graph.set_visibility(START, node)
    graph.add_edge(START, "Ann", visibility={}).add_edge("Ann", "Bob", visibility={})
    return (
        graph.add_edge("Bob", "Carol", visibility={}).add_edge("Carol", "again", visibility={}).add_edge("again", END)
    )


def shown(engine: Engine, state: Mapping[str, Any], node: str) -> tuple[list[list[int]], list[int]]:
    """The tokens of each message that a node's attended to, and its own."""
    [plain] = [entry["handle"] for entry in state["handles"] if entry["author"] == node]
    answer = MessageHandle.model_validate(plain)
    made = (*engine.inspect.thoughts(answer), answer)[0]
    # Words that were encoded again for one reader have no lease by now.
    parents = engine._tenant.find(answer).parents
    return [list(parent.tokens) for parent in parents], list(engine.tokens(made))


def require_same(engine: Engine, view: View, state: Mapping[str, Any], node: str) -> None:
    read, said = shown(engine, state, node)
    *messages, header = view_messages(engine.chat, view)
    wanted = [engine.model.encode(piece) for message in messages for piece in message.pieces]
    assert [engine.model.decode(each) for each in read] == [engine.model.decode(each) for each in wanted], view.title
    assert read == wanted
    start = engine.model.encode(header.text)
    assert said[: len(start)] == start


@pytest.mark.parametrize("mode", ["shared", pytest.param("reencoded", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", TEMPLATES)
def test_what_is_compared_is_what_a_graph_shows_its_agents(
    models: Callable[[str], LoadedModel], family: str, mode: str
) -> None:
    with Engine.load(models(family), memory=Memory(kv_budget_bytes=1 << 24)) as engine:
        options = {"configurable": {"choreo": RunOptions(replay=Says(engine))}}
        state = talk(mode).compile(engine=engine).invoke({"messages": [("user", QUESTION)]}, options)
        for node, number in VIEWS.items():
            require_same(engine, views(encodes_again=mode == "reencoded")[number], state, node)
        alone = ChoreoGraph().add_node(Agent("Ann")).add_edge(START, "Ann").add_edge("Ann", END)
        state = alone.compile(engine=engine).invoke({"messages": [("user", QUESTION)]}, options)
        require_same(engine, views(encodes_again=mode == "reencoded")[-1], state, "Ann")


def test_so_it_is_with_a_script() -> None:
    script = Script({name: [said.words] for name, said in SPEAKERS.items() if name != "again"} | {"again": ["Half."]})
    with script.load() as engine:
        state = talk("shared").compile(engine=engine).invoke({"messages": [("user", QUESTION)]})
        for node, number in VIEWS.items():
            require_same(engine, views()[number], state, node)
