"""What one thread has said is no business of another's lineage, also where both say the same words."""

from __future__ import annotations

import json
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.sqlite import SqliteSaver
from support.graphs import agent

from choreo_agents import END, START, ChoreoGraph, Engine, Memory, MessageHandle
from choreo_agents.errors import LineageWarning
from choreo_agents.testing import Script

SECRETS = {"1": "the password of Ann is swordfish", "2": "the password of Bob is haddock"}


def config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


def given(thread: str) -> Any:
    return {"messages": [("user", SECRETS[thread])]}


def graph() -> ChoreoGraph:
    """Ann answers; Bob reads an encoding of her words behind the public root, which is one for all threads."""
    graph = ChoreoGraph(system="Be brief.")
    graph.add_node(agent("ann")).add_node(agent("bob")).add_edge(START, "ann")
    return graph.add_edge("ann", "bob", visibility="reencoded", scope="public").add_edge("bob", END)


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[Engine] = []

    def make() -> Engine:
        made.append(Script(default="Fine.").load(memory=Memory(kv_budget_bytes=1 << 22), salt="s"))
        return made[-1]

    yield make
    for engine in made:
        engine.check()
        engine.close()


def tokens_of(engine: Engine, state: Any) -> bytes:
    """Of what the user has said, without what stands around it."""
    said = MessageHandle.model_validate(state["handles"][0]["handle"])
    return ",".join(map(str, engine.tokens(said)[-12:-4])).encode()


def stored(path: Path) -> bytes:
    return b"".join(each.read_bytes() for each in path.parent.glob(path.name + "*"))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("first", ["1", "2"])
def test_who_is_forgotten_stands_in_nobody_elses(processes: int, first: str, engines: Any, tmp_path: Path) -> None:
    """The same words of two threads are one message of the engine, made of both threads' words."""
    path, other = tmp_path / "states.lineage", "2" if first == "1" else "1"
    with SqliteSaver.from_conn_string(str(tmp_path / "states")) as saver:
        app = graph().compile(saver, engine=(engine := engines()))
        said = {"1": tokens_of(engine, app.invoke(given("1"), config("1")))}
        if processes == 2:
            app = graph().compile(saver, engine=(engine := engines()))
        said["2"] = tokens_of(engine, app.invoke(given("2"), config("2")))
        assert all(tokens in stored(path) for tokens in said.values())
        app.delete_thread(first)
        assert said[first] not in stored(path) and said[other] in stored(path)
        # The other thread is whole: it goes on in a new process from what is its own.
        with warnings.catch_warnings():
            warnings.simplefilter("error", LineageWarning)
            state = graph().compile(saver, engine=(last := engines())).invoke(given(other), config(other))
        assert len(state["messages"]) == 6 and last.stats().tokens_encoded > 0
        app.delete_thread(other)
    assert not sqlite3.connect(path).execute("SELECT * FROM store").fetchall()


def test_what_others_have_said_is_not_noted(engines: Any, tmp_path: Path) -> None:
    with SqliteSaver.from_conn_string(str(tmp_path / "states")) as saver:
        app = graph().compile(saver, engine=(engine := engines()))
        for thread in SECRETS:
            app.invoke(given(thread), config(thread))
    rows = sqlite3.connect(tmp_path / "states.lineage").execute("SELECT prefix, value FROM store").fetchall()
    written: dict[str, bytes] = {}
    for prefix, value in rows:
        written[prefix] = written.get(prefix, b"") + bytes(value)
    [one, two] = ({each["id"] for each in _notes(value)} for value in written.values())
    shared = one & two
    assert shared and one - shared and two - shared
    [of_one, of_two] = written.values()
    assert not any(each.encode() in of_two for each in one - shared)
    assert not any(each.encode() in of_one for each in two - shared)
    assert engine.stats().threads == 2


def _notes(written: bytes) -> Iterator[Any]:
    """What a log says of messages: its commits stand one behind the other."""
    at, text = 0, written.decode()
    while at < len(text):
        commit, at = json.JSONDecoder().raw_decode(text, at)
        yield from commit["messages"]
