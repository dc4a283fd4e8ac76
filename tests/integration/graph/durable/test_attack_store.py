"""Whoever writes to a store of lineage puts nothing there that is believed; whoever reads it learns no salt."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeEngine
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from support.graphs import FREE, agent, said
from support.stored import log_of, spoiled

from choreo_agents import END, START, ChoreoGraph, MessageHandle
from choreo_agents.errors import LineageWarning, StoreError
from choreo_agents.graph.durable.finding import lineage_store_for, open_store
from choreo_agents.graph.durable.thread_log import ThreadLog
from choreo_agents.graph.sync_bridge import run_coroutine

SALT, THREAD = "0c7a2e9d", "ann@example.org"
CONFIG: Any = {"configurable": {"thread_id": THREAD}}
ASKED: Any = {"messages": [("user", "What does Ann have?")]}
Spoil = Callable[[BaseStore], None]
"""Changes what is kept of Ann's message."""


def graph() -> ChoreoGraph:
    graph = ChoreoGraph(system="Agents read their notes.")
    for name in ("ann", "bob"):
        graph.add_node(agent(name, system=f"Notes: Ann has 3 red kites. {name}", prompt="Say it.", sampling=FREE))
    return graph.add_edge(START, "ann").add_edge("ann", "bob").add_edge("bob", END)


@contextmanager
def saved(folder: Path) -> Iterator[SqliteSaver]:
    with SqliteSaver.from_conn_string(str(folder / "states")) as saver:
        yield saver


def spoken(make_engine: MakeEngine, folder: Path) -> tuple[Any, dict[str, list[int]]]:
    """What Ann has said, in a process that ends then."""
    engine = make_engine(salt=SALT)
    with saved(folder) as saver:
        state = graph().compile(saver, engine=engine, interrupt_before=["bob"]).invoke(ASKED, CONFIG)
    return state, said(engine, state)


def id_of(state: Any, author: str) -> str:
    [entry] = [entry for entry in state["handles"] if entry["author"] == author]
    return str(entry["handle"]["id"])


def place_of(thread: str = THREAD, salt: str = SALT) -> tuple[str, ...]:
    return log_of(InMemoryStore(), thread, salt).place


def last_of(store: BaseStore) -> Any:
    """What Ann's node has written: there is nothing behind it."""
    return max(store.search(place_of(), limit=99), key=lambda item: item.key)


def other_words(store: BaseStore) -> None:
    item = last_of(store)
    tokens = item.value["messages"][-1]["tokens"]
    store.put(place_of(), item.key, spoiled(item.value, tokens=[*tokens[:-1], tokens[-1] ^ 1]))


def other_parents(store: BaseStore) -> None:
    store.put(place_of(), last_of(store).key, spoiled(last_of(store).value, parents=[]))


def another_tenants(store: BaseStore) -> None:
    """The same, under a seal that holds for somebody else."""
    item, plain = last_of(store), {name: each for name, each in last_of(store).value.items() if name != "seal"}
    there = log_of(store, salt="another")
    store.put(place_of(), item.key, {**plain, "seal": there._seals.seal(there._seal_purpose(item.key), plain)})


def another_threads(store: BaseStore) -> None:
    item, plain = last_of(store), {name: each for name, each in last_of(store).value.items() if name != "seal"}
    there = log_of(store, "2", SALT)
    store.put(place_of(), item.key, {**plain, "seal": there._seals.seal(there._seal_purpose(item.key), plain)})


def under_another_key(store: BaseStore) -> None:
    item = last_of(store)
    store.put(place_of(), f"9{item.key[1:]}", item.value)
    store.delete(place_of(), item.key)


def no_seal(store: BaseStore) -> None:
    item = last_of(store)
    store.put(place_of(), item.key, {name: value for name, value in item.value.items() if name != "seal"})


def a_list(store: Any) -> None:
    place = ".".join(place_of()), last_of(store).key
    store.conn.execute("UPDATE store SET value = '[]' WHERE prefix = ? AND key = ?", place)


def nothing_at_all(store: BaseStore) -> None:
    store.delete(place_of(), last_of(store).key)


SEAL, NONE = "its signature is not the tenant's", "it is not in the store"
SPOILS: tuple[tuple[Spoil, str], ...] = (
    (other_words, SEAL),
    (other_parents, SEAL),
    (another_tenants, SEAL),
    (another_threads, SEAL),
    (under_another_key, SEAL),
    (no_seal, SEAL),
    (a_list, "it is not a JSON object, but list"),
    (nothing_at_all, NONE),
)


@pytest.mark.parametrize(("spoil", "why"), SPOILS, ids=lambda each: getattr(each, "__name__", ""))
def test_attack_what_was_changed_is_not_attended_to(
    spoil: Spoil, why: str, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """The reader is told, and encodes the message's words, which stand in the checkpoint, by themselves."""
    state, _ = spoken(make_engine, tmp_path)
    spoil(open_store(tmp_path / "states.lineage"))
    engine = make_engine(salt=SALT)
    with saved(tmp_path) as saver, pytest.warns(LineageWarning, match=why):
        after = graph().compile(saver, engine=engine).invoke(None, CONFIG)
    assert id_of(after, "ann") != id_of(state, "ann")
    [words] = [message.text for message in state["messages"] if message.name == "ann"]
    assert words.strip() in engine.text(handle_of(after, "ann"))


def handle_of(state: Any, author: str) -> MessageHandle:
    [entry] = [entry for entry in state["handles"] if entry["author"] == author]
    return MessageHandle.model_validate(entry["handle"])


def test_attack_what_is_no_json_stops_the_run_and_is_not_read(make_engine: MakeEngine, tmp_path: Path) -> None:
    spoken(make_engine, tmp_path)
    store: Any = open_store(tmp_path / "states.lineage")
    true = last_of(store)
    store.conn.execute("UPDATE store SET value = '{' WHERE prefix = ? AND key = ?", (".".join(place_of()), true.key))
    with saved(tmp_path) as saver:
        app = graph().compile(saver, engine=make_engine(salt=SALT))
        with pytest.raises(StoreError, match="the store SqliteStore of the run's lineage failed"):
            app.invoke(None, CONFIG)
        store.put(place_of(), true.key, true.value)
        with warnings.catch_warnings():
            warnings.simplefilter("error", LineageWarning)
            assert len(app.invoke(None, CONFIG)["handles"]) == 3


def test_attack_a_thread_is_not_given_what_another_was_answered(make_engine: MakeEngine, tmp_path: Path) -> None:
    """All that is kept of one thread is copied to another's place: nobody there is answered by it."""
    spoken(make_engine, tmp_path)
    store: Any = open_store(tmp_path / "states.lineage")
    copied = store.search(place_of(), limit=99)
    for item in copied:
        store.put(place_of("2"), item.key, item.value)
    assert copied
    other: Any = {"configurable": {"thread_id": "2"}}
    engine, alone = make_engine(salt=SALT), make_engine(salt=SALT)
    asked: Any = {"messages": [("user", "What does Bob see?")]}
    with saved(tmp_path) as saver:
        app = graph().compile(saver, engine=engine)
        state = app.invoke(asked, other)
        assert run_coroutine(lineage_store_for(app, other, None)) is store
        mine = run_coroutine(ThreadLog(store, engine, "2").read())
    assert {*mine.keys} >= {entry["handle"]["id"] for entry in state["handles"]}
    assert said(engine, state) == said(alone, graph().compile(engine=alone).invoke(asked))
    assert engine.stats().tokens_encoded == alone.stats().tokens_encoded, "nothing was taken from the other thread"


def test_attack_tenants_have_nothing_of_each_other_in_one_store(make_engine: MakeEngine) -> None:
    """Equal words of equal threads are two logs; one tenant's is nothing to the other."""
    engine, store = make_engine(salt=SALT), InMemoryStore()
    tenant = engine.tenant("another secret")
    for each in (engine, tenant):
        graph().compile(InMemorySaver(), engine=each, lineage=store).invoke(ASKED, CONFIG)
    ours, theirs = (ThreadLog(store, each, THREAD) for each in (engine, tenant))
    own = {*run_coroutine(ours.read()).keys}
    assert own and not own & {*run_coroutine(theirs.read()).keys}
    for item in store.search(theirs.place, limit=99):
        store.put(ours.place, item.key, item.value)
    found = run_coroutine(ours.read())
    assert {*found.keys} == own and "signature" in (found.damaged or "")


def test_attack_the_store_tells_neither_salt_nor_thread_nor_words(make_engine: MakeEngine, tmp_path: Path) -> None:
    """What it tells are numbers of tokens: it is sealed, not encrypted."""
    _, words = spoken(make_engine, tmp_path)
    store = tmp_path / "states.lineage"
    found = b"".join(each.read_bytes() for each in tmp_path.glob("states.lineage*"))
    for secret in (SALT, THREAD, "kites", "What does Ann"):
        assert secret.encode() not in found
    assert ",".join(map(str, words["ann"][-6:-1])).encode() in found
    assert store.stat().st_mode & 0o777 == 0o600
    prefixes = {prefix for (prefix,) in sqlite3.connect(store).execute("SELECT prefix FROM store")}
    assert all(part == "choreo" or len(part) <= 32 for prefix in prefixes for part in prefix.split("."))
