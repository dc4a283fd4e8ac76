"""A run goes on in another engine as if it had never left: from lineage that a store keeps."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.store.memory import InMemoryStore
from langgraph.store.sqlite.aio import AsyncSqliteStore
from support.graphs import FREE, agent, said

from choreo_agents import END, START, ChoreoGraph, Engine, MessageHandle, RunOptions
from choreo_agents.errors import InvalidRequestError, LineageWarning

THREAD: Any = {"configurable": {"thread_id": "a.b/c"}}
ASKED: Any = {"messages": [("user", "What does Ann have?")]}
GREEDY = FREE.model_copy(update={"temperature": 0.0})
SECRET = "Notes: Ann has 3 red kites."


def graph(asked: Any = None) -> ChoreoGraph:
    """Ann and Bob answer at once; Cleo reads both, re-encoded Bob; Dan reads Cleo."""
    graph = ChoreoGraph(system="Agents read their notes.")
    for name in ("ann", "bob", "cleo", "dan"):
        graph.add_node(agent(name, system=f"{SECRET} {name}", prompt="Say it.", sampling=FREE))
    graph.add_edge(START, "ann", visibility=asked).add_edge(START, "bob", visibility=asked)
    graph.add_edge("ann", "cleo").add_edge("cleo", "dan")
    return graph.add_edge("bob", "cleo", visibility="reencoded").add_edge("dan", END)


@contextmanager
def saved(path: Path) -> Iterator[SqliteSaver]:
    with SqliteSaver.from_conn_string(str(path)) as saver:
        yield saver


def whole(make_engine: MakeEngine) -> dict[str, list[int]]:
    """What is said if nothing is broken off."""
    engine = make_engine(salt="s")
    state = graph().compile(InMemorySaver(), engine=engine, lineage=False).invoke(ASKED, THREAD)
    return said(engine, state)


def test_who_goes_on_elsewhere_says_what_would_have_been_said(make_engine: MakeEngine, tmp_path: Path) -> None:
    expected, first = whole(make_engine), make_engine(salt="s")
    with saved(tmp_path / "states") as saver:
        before = graph().compile(saver, engine=first, interrupt_before=["cleo"]).invoke(ASKED, THREAD)
    spoken = said(first, before)
    first.close()
    assert (tmp_path / "states.lineage").stat().st_mode & 0o777 == 0o600
    second = make_engine(salt="s")
    with saved(tmp_path / "states") as saver, warnings.catch_warnings():
        warnings.simplefilter("error", LineageWarning)
        state = graph().compile(saver, engine=second).invoke(None, THREAD)
        assert said(second, state) == expected and spoken.items() <= expected.items()
        # Nothing was encoded again but what had been lost, from its own parents.
        stats = second.stats()
        assert stats.tokens_recomputed > 0
        cleo = [entry for entry in state["handles"] if entry["author"] == "cleo"]
        assert len(cleo) == 1 and all("edited" not in entry for entry in state["handles"])
        # And a thread that has ended is known as well: nothing is computed to read it.
        third = make_engine(salt="s")
        again = graph().compile(saver, engine=third).invoke(None, THREAD)
        assert said(second, again) == expected and third.stats().tokens_encoded == 0


@pytest.mark.parametrize("lineage", [False, None])
def test_without_lineage_words_are_encoded_again_and_that_is_told(
    lineage: Any, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """With a checkpointer in memory there is no file that it could be kept in."""
    saver, store = InMemorySaver(), None
    app = graph().compile(saver, engine=make_engine(salt="s"), interrupt_before=["cleo"], lineage=lineage, store=store)
    app.invoke(ASKED, THREAD)
    app = graph().compile(saver, engine=make_engine(salt="s"), lineage=lineage)
    events: list[Any] = []
    with pytest.warns(LineageWarning, match="'cleo' reads messages .* of 'ann' .its inputs are not recorded"):
        events += list(app.stream(None, THREAD, stream_mode="custom"))
    told = [each for each in events if each["type"] == "choreo.reencoded"]
    assert {each["author"] for each in told[0]["messages"]} >= {"ann", "bob"} and told[0]["agent"] == "cleo"
    assert not [*tmp_path.iterdir()]


async def test_in_an_async_store_of_the_graph(make_engine: MakeEngine, tmp_path: Path) -> None:
    expected = whole(make_engine)
    path, kept = str(tmp_path / "states"), str(tmp_path / "store")
    async with AsyncSqliteSaver.from_conn_string(path) as saver, AsyncSqliteStore.from_conn_string(kept) as store:
        await store.setup()
        app = graph().compile(saver, engine=make_engine(salt="s"), interrupt_before=["dan"], store=store)
        await app.ainvoke(ASKED, THREAD)
    assert not (tmp_path / "states.lineage").exists()
    async with AsyncSqliteSaver.from_conn_string(path) as saver, AsyncSqliteStore.from_conn_string(kept) as store:
        engine = make_engine(salt="s")
        state = await graph().compile(saver, engine=engine, store=store).ainvoke(None, THREAD)
        assert said(engine, state) == expected


async def test_beside_an_async_checkpointer(make_engine: MakeEngine, tmp_path: Path) -> None:
    expected = whole(make_engine)
    for stop in (["dan"], []):
        async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "states")) as saver:
            engine = make_engine(salt="s")
            app = graph().compile(saver, engine=engine, interrupt_before=stop)
            state = await app.ainvoke(ASKED if stop else None, THREAD)
    assert said(engine, state) == expected and (tmp_path / "states.lineage").exists()


def test_a_store_is_no_ones_without_a_salt(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="has none: load the engine with salt"):
        graph().compile(InMemorySaver(), engine=make_engine(), lineage=InMemoryStore())
    with pytest.raises(InvalidRequestError, match="must be a LangGraph store, False or None, not 'x'"):
        graph().compile(InMemorySaver(), engine=make_engine(salt="s"), lineage="x")  # type: ignore[arg-type]
    with saved(tmp_path / "states") as saver:
        graph().compile(saver, engine=make_engine()).invoke(ASKED, THREAD)
    assert not (tmp_path / "states.lineage").exists()


def test_what_another_salt_has_written_is_nothing(make_engine: MakeEngine, tmp_path: Path) -> None:
    for salt, stop in (("s", ["cleo"]), ("t", [])):
        with saved(tmp_path / "states") as saver:
            app = graph().compile(saver, engine=make_engine(salt=salt), interrupt_before=stop)
            if stop:
                app.invoke(ASKED, THREAD)
            else:
                with pytest.warns(UserWarning):
                    state = app.invoke(None, THREAD)
    assert len([entry for entry in state["handles"] if entry["author"] == "cleo"]) == 1


@pytest.mark.parametrize("checkpointer", [None, False, True])
def test_what_is_said_in_a_subgraph_is_known_as_well(
    checkpointer: Any, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Also where the subgraph keeps no states of its own, before anybody outside has read it."""

    def outer(engine: Engine) -> ChoreoGraph:
        inner = ChoreoGraph(system="Agents read their notes.").add_node(agent("ann", sampling=GREEDY))
        inner.add_edge(START, "ann").add_edge("ann", END)
        graph = ChoreoGraph(system="Agents read their notes.", visibility="shared")
        graph.add_node("team", inner.compile(checkpointer, engine=engine)).add_node(agent("bob", sampling=GREEDY))
        return graph.add_edge(START, "team").add_edge("team", "bob").add_edge("bob", END)

    whole = outer(engine := make_engine(salt="s")).compile(InMemorySaver(), engine=engine).invoke(ASKED, THREAD)
    expected = said(engine, whole)
    with saved(tmp_path / "states") as saver, warnings.catch_warnings():
        warnings.simplefilter("error", LineageWarning)
        first, second = make_engine(salt="s"), make_engine(salt="s")
        outer(first).compile(saver, engine=first, interrupt_before=["bob"]).invoke(ASKED, THREAD)
        state = outer(second).compile(saver, engine=second).invoke(None, THREAD)
    assert said(second, state) == expected


def answer(engine: Engine, state: Any, author: str) -> str:
    [entry] = [entry for entry in state["handles"] if entry["author"] == author]
    return engine.text(MessageHandle.model_validate(entry["handle"]))


def bytes_of(path: Path) -> bytes:
    return b"".join(each.read_bytes() for each in path.parent.glob(path.name + "*"))


def test_a_forgotten_thread_leaves_nothing_in_the_file(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, other = make_engine(salt="s"), {"configurable": {"thread_id": "2"}}
    with saved(tmp_path / "states") as saver:
        app = graph().compile(saver, engine=engine)
        state, own = app.invoke(ASKED, THREAD), {"messages": [("user", "Where does Bob live?")]}
        kept = app.invoke(own, other)
        tokens = {
            author: b",".join(str(token).encode() for token in engine.tokens(handle_of(state, author))[-12:-2])
            for author in ("ann", "cleo", "dan")
        }
        found = bytes_of(tmp_path / "states.lineage")
        assert all(said in found for said in tokens.values())
        app.delete_thread("a.b/c")
        left = bytes_of(tmp_path / "states.lineage")
        assert not any(said in left for said in tokens.values())
        # The other thread goes on elsewhere as before.
        rows = sqlite3.connect(tmp_path / "states.lineage").execute("SELECT prefix FROM store").fetchall()
        assert len({prefix for (prefix,) in rows}) == 1
        engine2 = make_engine(salt="s")
        with warnings.catch_warnings():
            warnings.simplefilter("error", LineageWarning)
            again = graph().compile(saver, engine=engine2).invoke({"messages": [("user", "And?")]}, other)
        assert len(again["handles"]) == 2 * len(kept["handles"])
        app.delete_thread("2")
    assert not sqlite3.connect(tmp_path / "states.lineage").execute("SELECT * FROM store").fetchall()


def handle_of(state: Any, author: str) -> MessageHandle:
    [entry] = [entry for entry in state["handles"] if entry["author"] == author]
    return MessageHandle.model_validate(entry["handle"])


def test_who_is_asked_again_has_the_new_answer_everywhere(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The same call has one answer, its last, in every process."""
    with saved(tmp_path / "states") as saver:
        app = graph().compile(saver, engine=(engine := make_engine(salt="s")))
        first = said(engine, app.invoke(ASKED, THREAD))
        start = next(each for each in app.get_state_history(THREAD) if each.next == ("dan",))
        assert said(engine, app.invoke(None, start.config))["dan"] == first["dan"]
        other = {**start.config["configurable"], "choreo": RunOptions(seed=7, regenerate=True)}
        second = said(engine, app.invoke(None, {"configurable": other}))["dan"]
        assert second != first["dan"]
        steps = (engine := make_engine(salt="s")).stats().steps
        plain = {"configurable": {**start.config["configurable"], "choreo": RunOptions(seed=7)}}
        state = graph().compile(saver, engine=engine).invoke(None, plain)
        assert said(engine, state)["dan"] == second and engine.stats().steps == steps


class TestKeptKV:
    """What has a file is not computed again."""

    def run(
        self, make_engine: MakeEngine, folder: Path, stop: list[str], given: Any, asked: Any = None, **memory: Any
    ) -> Any:
        rows: dict[str, list[torch.Tensor]] = {}

        def watch(author: str, *_: int) -> Any:
            return lambda row: rows.setdefault(author, []).append(row.clone())

        config = {"configurable": {**THREAD["configurable"], "choreo": RunOptions(logits_callback=watch)}}
        with saved(folder / "states") as saver:
            engine = make_engine(salt="s", **memory)
            state = graph(asked).compile(saver, engine=engine, interrupt_before=stop).invoke(given, config)
        found = said(engine, state), rows, engine.stats()
        handles = [MessageHandle.model_validate(entry["handle"]) for entry in state["handles"]]
        kv = {handle.id: engine.kv.read(handle).tensors() for handle in handles}
        engine.close()
        return *found, kv

    @pytest.mark.parametrize(("asked", "recomputed"), [("shared", 0), (None, 7)])
    def test_it_comes_back_bit_by_bit(
        self, make_engine: MakeEngine, tmp_path: Path, asked: Any, recomputed: int
    ) -> None:
        """By default Ann and Bob read the question behind their notes: Cleo is the first who reads it as it came in."""
        (tmp_path / "whole").mkdir()
        words, rows, *_ = self.run(make_engine, tmp_path / "whole", [], ASKED, asked)
        *_, before = self.run(make_engine, tmp_path, ["cleo"], ASKED, asked, persist_dir=tmp_path / "kv")
        again, later, stats, after = self.run(make_engine, tmp_path, [], None, asked, persist_dir=tmp_path / "kv")
        assert again == words and stats.tokens_recomputed == recomputed and len(before) == 3
        for message, kv in before.items():
            assert all(torch.equal(tensor, after[message][name]) for name, tensor in kv.items())
        assert [*later] == ["cleo", "dan"]
        for author, made in later.items():
            # What is new is encoded in steps of other shapes.
            close = [
                torch.allclose(one, other, rtol=0, atol=1e-5) for one, other in zip(made, rows[author], strict=True)
            ]
            assert len(close) == 24 and all(close)

    def test_files_of_a_forgotten_thread_are_removed(self, make_engine: MakeEngine, tmp_path: Path) -> None:
        self.run(make_engine, tmp_path, [], ASKED, persist_dir=tmp_path / "kv")
        files = {*tmp_path.glob("kv/*/*/*.safetensors")}
        assert len(files) >= 5
        with saved(tmp_path / "states") as saver:
            engine = make_engine(salt="s", persist_dir=tmp_path / "kv")
            graph().compile(saver, engine=engine).delete_thread(THREAD["configurable"]["thread_id"])
            engine.kv.flush()
        assert not [*tmp_path.glob("kv/*/*/*.safetensors")]
