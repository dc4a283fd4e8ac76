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
from support.stored import TENANT, keys_of, named, sealed_of, store_of, thread_named, writes

from choreo_agents import END, START, ChoreoGraph, MessageHandle
from choreo_agents.errors import LineageWarning, StoreError
from choreo_agents.graph.durable.beside import opened
from choreo_agents.graph.durable.finding import lineage_store_for
from choreo_agents.graph.durable.lineage_store import LineageStore, answers_of, notes_of, rows_of
from choreo_agents.graph.sync_bridge import run_coroutine

SALT, THREAD = "0c7a2e9d", "ann@example.org"
CONFIG: Any = {"configurable": {"thread_id": THREAD}}
ASKED: Any = {"messages": [("user", "What does Ann have?")]}
OURS = sealed_of(SALT)[0]
Spoil = Callable[[BaseStore, str], str]
"""Changes what is kept of a message, and returns what is said of that."""


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


def row_of(store: BaseStore, message_id: str) -> dict[str, Any]:
    item = store.get(rows_of(OURS), message_id)
    assert item is not None
    return item.value


def other_words(store: BaseStore, message_id: str) -> str:
    row = row_of(store, message_id)
    store.put(rows_of(OURS), message_id, {**row, "tokens": [*row["tokens"][:-1], row["tokens"][-1] ^ 1]})
    return "it does not bear the tenant's seal"


def other_parents(store: BaseStore, message_id: str) -> str:
    store.put(rows_of(OURS), message_id, {**row_of(store, message_id), "parents": []})
    return "it does not bear the tenant's seal"


def another_tenants(store: BaseStore, message_id: str) -> str:
    """The same row, under a seal that holds for somebody else."""
    row = sealed_of(SALT)[1].read_row(row_of(store, message_id))
    store.put(rows_of(OURS), message_id, sealed_of("another")[1].row(row))
    return "it does not bear the tenant's seal"


def its_childs(store: BaseStore, message_id: str) -> str:
    """A true row in its parent's place, so that it comes of itself."""
    [first, *_] = row_of(store, message_id)["parents"]
    store.put(rows_of(OURS), first[0], row_of(store, message_id))
    return "it comes of " + first[0]


def anothers(store: BaseStore, message_id: str) -> str:
    [first, *_] = row_of(store, message_id)["parents"]
    store.put(rows_of(OURS), message_id, row_of(store, first[0]))
    return "somebody has put it in this place"


def no_seal(store: BaseStore, message_id: str) -> str:
    row = row_of(store, message_id)
    store.put(rows_of(OURS), message_id, {name: value for name, value in row.items() if name != "seal"})
    return "it does not bear the tenant's seal"


def nothing_at_all(store: BaseStore, message_id: str) -> str:
    store.delete(rows_of(OURS), message_id)
    return "it is not in the store"


def a_list(store: Any, message_id: str) -> str:
    place = ".".join(rows_of(OURS)), message_id
    store.conn.execute("UPDATE store SET value = '[]' WHERE prefix = ? AND key = ?", place)
    return "it is no object of JSON, but list"


SPOILS = (other_words, other_parents, another_tenants, its_childs, anothers, no_seal, nothing_at_all, a_list)


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_attack_a_row_that_was_changed_is_not_attended_to(
    spoil: Spoil, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """The reader is told, and encodes the message's words, which stand in the checkpoint, by themselves."""
    state, _ = spoken(make_engine, tmp_path)
    why = spoil(opened(tmp_path / "states.lineage"), id_of(state, "ann"))
    engine = make_engine(salt=SALT)
    with saved(tmp_path) as saver, pytest.warns(LineageWarning, match=why):
        after = graph().compile(saver, engine=engine).invoke(None, CONFIG)
    assert id_of(after, "ann") != id_of(state, "ann") and id_of(after, START) == id_of(state, START)
    [words] = [message.text for message in state["messages"] if message.name == "ann"]
    assert words.strip() in engine.text(handle_of(after, "ann"))


def handle_of(state: Any, author: str) -> MessageHandle:
    [entry] = [entry for entry in state["handles"] if entry["author"] == author]
    return MessageHandle.model_validate(entry["handle"])


def test_attack_what_is_no_json_stops_the_run_and_is_not_read(make_engine: MakeEngine, tmp_path: Path) -> None:
    state, _ = spoken(make_engine, tmp_path)
    store: Any = opened(tmp_path / "states.lineage")
    true = row_of(store, id_of(state, "ann"))
    place = ".".join(rows_of(OURS)), id_of(state, "ann")
    store.conn.execute("UPDATE store SET value = '{' WHERE prefix = ? AND key = ?", place)
    with saved(tmp_path) as saver:
        app = graph().compile(saver, engine=make_engine(salt=SALT))
        with pytest.raises(StoreError, match="the store SqliteStore of the run's lineage has failed"):
            app.invoke(None, CONFIG)
        store.put(rows_of(OURS), id_of(state, "ann"), true)
        with warnings.catch_warnings():
            warnings.simplefilter("error", LineageWarning)
            assert len(app.invoke(None, CONFIG)["handles"]) == 3


def test_attack_a_note_that_was_moved_says_nothing_in_another_thread() -> None:
    """Who has said what, and which calls that answers, is each thread's own."""
    store = InMemoryStore()
    ann, bob = thread_named("ann"), thread_named("bob")
    store.batch([*writes("ann", [1, 2]), *writes("bob", [3])])
    for number in (1, 2):
        [item] = store.search(notes_of(TENANT, ann, named(number)))
        store.put(notes_of(TENANT, bob, named(number)), item.key, item.value)
    [item] = store.search(notes_of(TENANT, bob, named(3)))
    store.put(notes_of(TENANT, bob, named(4)), item.key, item.value)
    there = store_of(store)
    assert [note.id for note in run_coroutine(there.notes(bob))] == [named(3)]
    assert {each: "seal" in why for each, why in there.damaged.items()} == {
        named(1): True,
        named(2): True,
        named(4): False,
    }
    assert "somebody has put it in this place" in there.damaged[named(4)]


def test_attack_a_thread_is_not_given_what_another_was_answered(make_engine: MakeEngine, tmp_path: Path) -> None:
    """All that is kept of one thread is copied to another's place: nobody there is answered by it."""
    spoken(make_engine, tmp_path)
    store: Any = opened(tmp_path / "states.lineage")
    sealed = sealed_of(SALT)[1]
    for item in store.search(notes_of(OURS, sealed.thread(THREAD)), limit=99):
        store.put((*notes_of(OURS, sealed.thread("2")), item.namespace[-1]), item.key, item.value)
    answers = store.search(answers_of(OURS, sealed.thread(THREAD)), limit=99)
    for item in answers:
        store.put(answers_of(OURS, sealed.thread("2")), item.key, item.value)
    assert answers
    other: Any = {"configurable": {"thread_id": "2"}}
    engine, alone = make_engine(salt=SALT), make_engine(salt=SALT)
    asked: Any = {"messages": [("user", "What does Bob see?")]}
    with saved(tmp_path) as saver:
        app = graph().compile(saver, engine=engine)
        state = app.invoke(asked, other)
        found = run_coroutine(lineage_store_for(app, other, None))
        assert found is store
        mine = run_coroutine(LineageStore(store, engine).notes(sealed.thread("2")))
    assert {note.id for note in mine} >= {entry["handle"]["id"] for entry in state["handles"]}
    assert said(engine, state) == said(alone, graph().compile(engine=alone).invoke(asked))
    assert engine.stats().tokens_encoded == alone.stats().tokens_encoded, "nothing was taken from the other thread"


def test_attack_tenants_have_nothing_of_each_other_in_one_store(make_engine: MakeEngine) -> None:
    """Equal words of equal threads are two rows; one tenant's are no names to the other, and go by themselves."""
    engine, store = make_engine(salt=SALT), InMemoryStore()
    tenant = engine.tenant("another secret")
    for each in (engine, tenant):
        graph().compile(InMemorySaver(), engine=each, lineage=store).invoke(ASKED, CONFIG)
    names = OURS, tenant.lineage.name
    ours, theirs = ({key[-1] for key in keys_of(store, "choreo", "rows", name)} for name in names)
    assert ours and theirs and not ours & theirs
    for message_id in theirs:
        item = store.get(rows_of(tenant.lineage.name), message_id)
        assert item is not None
        store.put(rows_of(OURS), message_id, item.value)
    there = LineageStore(store, engine)
    assert run_coroutine(there.rows([*theirs])) == {} and there.damaged.keys() == theirs


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
