"""What one process has forgotten, lost or been told anew is no surprise to the next."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import pytest
from conftest import MakeEngine
from langchain_core.messages import AnyMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph.message import add_messages
from langgraph.store.memory import InMemoryStore
from langgraph.store.sqlite.aio import AsyncSqliteStore
from support.graphs import FREE, agent
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState, Engine, Memory, RunOptions, Sampling
from choreo_agents.errors import LineageWarning, StoreError
from choreo_agents.graph.durable import thread_log
from choreo_agents.graph.durable.thread_log import ThreadLog, read_items
from choreo_agents.graph.sync_bridge import run_coroutine
from choreo_agents.testing import Script

ASKED: Any = {"messages": [("user", "What does Ann have?")]}


@pytest.fixture(autouse=True)
def as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine knows what another has written or read."""
    monkeypatch.setattr(thread_log, "known_log", lambda log: log)


def config(thread: str = "1", **options: Any) -> Any:
    return {"configurable": {"thread_id": thread, "choreo": RunOptions(**options)}}


def chain(*names: str) -> ChoreoGraph:
    graph = ChoreoGraph(system="Be brief.", visibility="shared")
    for at, name in enumerate(names):
        graph.add_node(agent(name, sampling=FREE)).add_edge(names[at - 1] if at else START, name)
    return graph.add_edge(names[-1], END)


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[SqliteSaver]:
    with SqliteSaver.from_conn_string(str(tmp_path / "states")) as saver:
        yield saver


@pytest.fixture
def scripted() -> Iterator[Any]:
    made: list[Engine] = []

    def make(script: Script) -> Engine:
        made.append(script.load(memory=Memory(kv_budget_bytes=1 << 22), salt="s"))
        return made[-1]

    yield make
    for engine in made:
        engine.check()
        engine.close()


@contextmanager
def nothing_encoded_again() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", LineageWarning)
        yield


def before(app: Any, node: str, thread: str = "1", **options: Any) -> Any:
    """The config of the state before a node's first run, with options of the run that goes on there."""
    found = [each for each in app.get_state_history(config(thread)) if each.next == (node,)][-1]
    return {"configurable": {**found.config["configurable"], "choreo": RunOptions(**options)}}


@pytest.mark.parametrize("words", ["What does Ann have?", "Where is Bob?"])
def test_a_thread_that_another_forgot_begins_anew(
    words: str, make_engine: MakeEngine, saver: SqliteSaver, tmp_path: Path
) -> None:
    one, two, three = (chain("ann", "bob").compile(saver, engine=make_engine(salt="s")) for _ in range(3))
    two.invoke(ASKED, config())
    one.delete_thread("1")
    two.invoke({"messages": [("user", words)]}, config())
    with nothing_encoded_again():
        three.invoke({"messages": [("user", "And?")]}, config())


def test_a_lost_row_is_written_again(make_engine: MakeEngine, saver: SqliteSaver, tmp_path: Path) -> None:
    chain("ann", "bob").compile(saver, engine=make_engine(salt="s")).invoke(ASKED, config())
    store = sqlite3.connect(tmp_path / "states.lineage", isolation_level=None)
    store.execute("DELETE FROM store WHERE key = (SELECT min(key) FROM store)")  # with the public root
    with pytest.warns(LineageWarning, match="it is not in the store"):
        chain("ann", "bob").compile(saver, engine=make_engine(salt="s")).invoke(ASKED, config())
    with nothing_encoded_again():
        chain("ann", "bob").compile(saver, engine=make_engine(salt="s")).invoke(ASKED, config())


def test_what_another_thread_has_here_is_the_threads_own_as_well(make_engine: MakeEngine, saver: SqliteSaver) -> None:
    app = chain("ann", "bob").compile(saver, engine=make_engine(salt="s"))
    for thread in ("1", "2"):
        app.invoke(ASKED, config(thread))
    app = chain("ann", "bob").compile(saver, engine=(engine := make_engine(salt="s")))
    for thread in ("1", "2"):
        app.invoke(None, before(app, "ann", thread))
    assert engine.stats().steps == 0, "both are told what they have said"


def test_the_last_answer_counts_in_every_process(saver: SqliteSaver, scripted: Any) -> None:
    numbers = count()
    script = Script(default=lambda _: f"Answer {next(numbers)}.")
    app = chain("ann", "bob").compile(saver, engine=scripted(script))
    first = app.invoke(ASKED, config())["messages"][-1].text
    again = app.invoke(None, before(app, "bob", regenerate=True))["messages"][-1].text
    assert again != first == "Answer 1."
    assert app.invoke(None, before(app, "bob"))["messages"][-1].text == again
    there = chain("ann", "bob").compile(saver, engine=scripted(script))
    assert there.invoke(None, before(there, "bob"))["messages"][-1].text == again


def test_nobody_says_again_what_somebody_else_has_said_since(scripted: Any) -> None:
    numbers, store, saver = count(), InMemoryStore(), InMemorySaver()
    script = Script(default=lambda _: f"Answer {next(numbers)}.")
    apps = [chain("ann", "bob").compile(saver, engine=scripted(script), lineage=store) for _ in range(2)]
    one, two = apps
    assert one.invoke(ASKED, config())["messages"][-1].text == "Answer 1."
    assert two.invoke(None, before(two, "bob", regenerate=True))["messages"][-1].text == "Answer 2."
    place = ThreadLog(store, one.builder.engine, "1").place
    size = len(store.search(place, limit=99))
    for app in (*apps, *apps):
        assert app.invoke(None, before(app, "bob"))["messages"][-1].text == "Answer 2."
    assert len(store.search(place, limit=99)) == size


def test_processes_that_take_turns_write_what_one_would(scripted: Any) -> None:
    """In each turn what is new, and nothing that the other one has said."""
    sizes = []
    for processes in (1, 2):
        store, saver = InMemoryStore(), InMemorySaver()
        graph = ChoreoGraph(system="Be brief.")
        graph.add_node(agent("ann", prompt="Say it.")).add_node(agent("bob", system="Bob has 3 kites."))
        graph.add_edge(START, "ann").add_edge("ann", "bob", visibility="reencoded").add_edge("bob", END)
        script = Script(default="Fine.")
        apps = [graph.compile(saver, engine=scripted(script), lineage=store) for _ in range(processes)]
        for turn in range(8):
            apps[turn % processes].invoke({"messages": [("user", f"Turn {turn}.")]}, config())
        place = ThreadLog(store, apps[0].builder.engine, "1").place
        sizes.append([len(item.value["messages"]) for item in run_coroutine(read_items(store, place))])
    assert sizes[0] == sizes[1]


def test_what_has_come_to_its_end_is_written_again(make_engine: MakeEngine) -> None:
    """As a store does with its TTL: who is still under way goes on, and so does who comes next."""
    store, saver = InMemoryStore(), InMemorySaver()
    app = chain("ann", "bob").compile(saver, engine=(engine := make_engine(salt="s")), lineage=store)
    app.invoke(ASKED, config())
    place = ThreadLog(store, engine, "1").place
    for item in store.search(place, limit=99):
        store.delete(place, item.key)
    app.invoke({"messages": [("user", "And?")]}, config())
    with nothing_encoded_again():
        chain("ann", "bob").compile(saver, engine=make_engine(salt="s"), lineage=store).invoke(
            {"messages": [("user", "And then?")]}, config()
        )


def test_what_another_process_was_answered_before_it_was_killed_is_known(saver: SqliteSaver, scripted: Any) -> None:
    """This one has read the thread before, and its state tells nothing of a node that had answered."""
    script = Script(default=lambda call: f"{call.agent} {len(script.calls)}.")
    one, two = (chain("ann", "bob").compile(saver, engine=scripted(script)) for _ in range(2))
    one.invoke(ASKED, config(), interrupt_before=["bob"])
    # Whoever is killed when a node has returned leaves the state from before it.
    two.invoke(None, config())
    said = len(script.calls)
    one.invoke(None, before(one, "bob"))
    assert len(script.calls) == said


def test_another_call_with_the_same_words_is_remembered(saver: SqliteSaver, scripted: Any) -> None:
    script = Script(default="Fine.")
    app = chain("ann", "bob").compile(saver, engine=scripted(script))
    app.invoke(ASKED, config())
    app.invoke(None, before(app, "bob", seed=5))
    assert len(script.calls) == 3
    there = chain("ann", "bob").compile(saver, engine=scripted(script))
    there.invoke(None, before(there, "bob", seed=5))
    assert len(script.calls) == 3


@pytest.mark.parametrize("default", ["Fine.", None])
def test_two_processes_add_to_what_is_said_of_one_message(
    default: str | None, saver: SqliteSaver, scripted: Any
) -> None:
    """By turns, each as it has read the thread before the other wrote: neither takes back what the other says."""
    numbers = count()
    script = Script(default=default or (lambda _: f"Answer {next(numbers)}."))
    one, two = (chain("ann", "bob").compile(saver, engine=scripted(script)) for _ in range(2))
    one.invoke(ASKED, config())
    two.invoke(None, before(two, "bob"))
    for seed in range(1, 5):
        (one, two)[seed % 2].invoke(None, before(one, "bob", seed=seed))
    told = {seed: one.invoke(None, before(one, "bob", seed=seed))["messages"][-1].text for seed in range(1, 5)}
    said = len(script.calls)
    there = chain("ann", "bob").compile(saver, engine=scripted(script))
    for seed in range(1, 5):
        assert there.invoke(None, before(there, "bob", seed=seed))["messages"][-1].text == told[seed]
    assert len(script.calls) == said, "each call finds its answer, whoever wrote it"


def test_a_file_that_was_removed_is_made_again(make_engine: MakeEngine, tmp_path: Path) -> None:
    for _ in range(2):
        for path in tmp_path.glob("states*"):
            path.unlink()
        with SqliteSaver.from_conn_string(str(tmp_path / "states")) as saver:
            app = chain("ann", "bob").compile(saver, engine=make_engine(salt="s"), interrupt_before=["bob"])
            app.invoke(ASKED, config())
    with SqliteSaver.from_conn_string(str(tmp_path / "states")) as saver, nothing_encoded_again():
        chain("ann", "bob").compile(saver, engine=make_engine(salt="s")).invoke(None, config())


async def test_a_sync_call_in_the_loop_of_an_async_store_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    async with AsyncSqliteStore.from_conn_string(str(tmp_path / "store")) as store:
        await store.setup()
        app = chain("ann").compile(InMemorySaver(), engine=make_engine(salt="s"), store=store)
        with pytest.raises(StoreError, match=r"use await ainvoke\(\) there"):
            app.invoke(ASKED, config())
        assert (await app.ainvoke(ASKED, config("2")))["handles"]


class Drafts(ChoreoState):
    drafts: Annotated[list[AnyMessage], add_messages]
    rounds: int


@pytest.mark.parametrize("kept", [True, False])
def test_what_a_function_is_answered_in_a_loop_stands_side_by_side(kept: bool, scripted: Any) -> None:
    script = Script(default=lambda call: f"{len(script.calls)}.")
    asked = agent("ann", engine=scripted(script), prompt=lambda state: f"Draft {state.get('rounds', 0)}.")

    def drafting(state: Drafts, config: RunnableConfig) -> Any:
        return {"drafts": asked.invoke(state, config)["messages"], "rounds": state.get("rounds", 0) + 1}

    graph = ChoreoGraph(Drafts, system="Be brief.").add_node("draft", drafting).add_edge(START, "draft")
    graph.add_conditional_edges("draft", lambda state: "draft" if state["rounds"] < 3 else END, ["draft", END])
    app = graph.compile(InMemorySaver() if kept else None, engine=asked.engine)
    assert len({each.text for each in app.invoke(ASKED, config())["drafts"]}) == 3


def test_a_fork_has_its_own_thoughts_before_the_same_answer(tmp_path: Path) -> None:
    tokenizer = tokenizer_for("Qwen 3")
    save_tiny_llama(tmp_path / "model", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(tmp_path / "model")
    sampling = Sampling(temperature=1.0, max_tokens=8)
    with Engine.load(tmp_path / "model", memory=Memory(kv_budget_bytes=1 << 23), salt="s") as engine:
        graph = ChoreoGraph().add_node(Agent("ann", choices=["Yes."], sampling=sampling, thinking=12))
        app = graph.add_edge(START, "ann").add_edge("ann", END).compile(InMemorySaver(), engine=engine)

        def thoughts(state: Any) -> Any:
            return [each["thoughts"] for each in state["handles"] if each["author"] == "ann"]

        one = thoughts(app.invoke(ASKED, config(seed=1)))
        two = thoughts(app.invoke(None, before(app, "ann", seed=2)))
        assert one != two and thoughts(app.invoke(None, before(app, "ann", seed=1))) == one
