"""Whatever stands in a graph, and whoever runs on which model: a reader sees what it would see on one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langgraph.checkpoint.memory import InMemorySaver
from support.chatty import save_chatty
from support.two_models import ASKED, saying, seen_by, speaker

from choreo_agents import END, START, ChoreoGraph, Engine, Memory
from choreo_agents.models import LoadedModel, load_model

NAMES = ("ann", "bob", "carl", "dora")
WORDS = {
    "ann": "Ann has 3 red kites.",
    "bob": "Bob has 2 blue cups.",
    "carl": "Carl has 4 green hats.",
    "dora": "Dora has 5 old books.",
}
MODES = ("shared", "shared", "reencoded", None)


@pytest.fixture(scope="module")
def engines(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    models = {"small": tiny, "large": load_model(save_chatty(tmp_path_factory.mktemp("chatty")))}
    made = {name: Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23)) for name, model in models.items()}
    yield made
    for engine in made.values():
        engine.check()
        engine.close()


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, str], ChoreoGraph]:
    """Which model each agent runs on, and a graph of two rounds."""
    on = {name: draw(st.sampled_from(["small", "large"])) for name in NAMES}
    personas = draw(st.sampled_from([{}, {"ann": "a", "carl": "a"}, {"ann": "a", "dora": "a"}]))
    graph = ChoreoGraph(system=draw(st.sampled_from([None, "Agents read their notes."])))
    told = draw(st.sets(st.sampled_from(NAMES)))
    for name in NAMES:
        persona = personas.get(name)
        graph.add_node(
            speaker(
                name,
                on[name],
                persona=persona,
                system=f"You are {persona or name}." if (persona or name) in told | {"a"} else None,
                prompt=draw(st.sampled_from([None, "Go on."])),
            )
        )
    # ann, then bob and carl side by side, then dora, and all once more
    for reader in NAMES:
        for source in NAMES:
            mode = draw(st.sampled_from(MODES))
            if mode is not None and source != reader:
                graph.set_visibility(source, reader, mode)
    graph.add_edge(START, "ann").add_edge("ann", "bob", visibility={}).add_edge("ann", "carl", visibility={})
    graph.add_edge(["bob", "carl"], "dora", visibility={}).add_edge("dora", END)
    return on, graph


def _twice(app: Any, config: Any) -> Any:
    app.invoke(ASKED, config)
    return app.invoke({"messages": [("user", "And now?")]}, config)


@settings(max_examples=5)
@given(graphs())
def test_a_reader_sees_what_it_would_see_on_one_model(
    engines: dict[str, Engine], drawn: tuple[dict[str, str], ChoreoGraph]
) -> None:
    on, graph = drawn
    with engines["small"].scope(), engines["large"].scope():
        by_name = {name: engines[on[name]] for name in NAMES}
        state = _twice(graph.compile(InMemorySaver(), engine=engines), saying(by_name, WORDS, thread_id="1"))
        for model, engine in engines.items():
            alone = graph.compile(InMemorySaver(), engine=dict.fromkeys(engines, engine))
            expected = _twice(alone, saying(dict.fromkeys(NAMES, engine), WORDS, thread_id="1"))
            for name in [name for name in NAMES if on[name] == model]:
                assert seen_by(engine, state, name) == seen_by(engine, expected, name)
