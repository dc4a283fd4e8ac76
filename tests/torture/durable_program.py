"""The graph whose processes are killed, and where its threads are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.store.base import BaseStore
from langgraph.types import Command, interrupt

from choreo_agents import END, START, Agent, ChoreoGraph, ChoreoState, Engine, Memory, Sampling, Send, Worker
from choreo_agents.models import LoadedModel

Store = Literal["sqlite", "postgres"]
SALT, ROUNDS = "torture", 3
ROOT = Path(__file__).parents[2]
_SAYING = Sampling(temperature=1.0, max_tokens=10, stop_tokens=())


class Rounds(ChoreoState, total=False):
    """Rounds that are over."""

    rounds: int


def graph() -> ChoreoGraph:
    """Ann, Bob and two instances of a worker with two answers each; a judge who reads them all, Bob in a fresh
    encoding; and a person, who is asked whether to go on."""
    graph = ChoreoGraph(Rounds, system="Agents read their notes.")
    for name in ("ann", "bob", "judge"):
        graph.add_node(Agent(name, system=f"Notes: Ann has 3 red kites. {name}", prompt="Say it.", sampling=_SAYING))
    worker = Worker("worker", n=2, sampling=_SAYING)

    def sent(state: Rounds) -> list[Send]:
        return [worker.send(state, f"Write part {part}.") for part in (1, 2)]

    graph.add_node(worker).add_node("gate", lambda _: None).add_node("person", _person)
    for name in ("ann", "bob", "gate"):
        graph.add_edge(START, name)
    graph.add_conditional_edges("gate", sent, ["worker"])
    graph.add_edge(["ann", "bob", "worker"], "judge", visibility={"bob": "reencoded"})
    graph.set_visibility("judge", "ann").add_edge("judge", "person")
    return graph.add_conditional_edges("person", _again, ["ann", "bob", "gate", END])


def _person(state: Rounds) -> dict[str, Any]:
    told = interrupt(f"round {state.get('rounds', 0)}")
    return {"messages": [HumanMessage(told)], "rounds": state.get("rounds", 0) + 1}


def _again(state: Rounds) -> list[str]:
    return ["ann", "bob", "gate"] if state.get("rounds", 0) < ROUNDS else [END]


def next_input(thread: str, snapshot: Any) -> tuple[bool, Any]:
    """Whether a thread has not ended, and what it goes on with from where its checkpoint has it.

    `next` leaves out nodes whose updates are kept: if a process dies when all of a superstep's are, it is empty, too.
    """
    if not snapshot.values.get("messages") and not snapshot.tasks:
        return True, {"messages": [("user", f"What does Ann have in {thread}?")]}
    if snapshot.interrupts:
        return True, Command(resume=f"Go on, {thread}: {snapshot.interrupts[0].value} is over.")
    return bool(snapshot.tasks), None


def seed_of(thread: str) -> int:
    """Of its runs."""
    return int(thread.removeprefix("thread-"))


def engine_of(model: LoadedModel) -> Engine:
    """One of the tenant's, that knows nothing yet."""
    return Engine.load(model, memory=Memory(kv_budget_bytes=1 << 23), salt=SALT)


@dataclass(frozen=True)
class Whereabouts:
    """Where threads and their lineage are kept."""

    store: Store
    at: str
    """The checkpointer's file, or the server's address."""

    @contextmanager
    def opened(self) -> Iterator[tuple[BaseCheckpointSaver[Any], BaseStore | None]]:
        """The checkpointer, and the store of lineage if it is not beside it."""
        with ExitStack() as opened:
            if self.store == "sqlite":
                from langgraph.checkpoint.sqlite import SqliteSaver

                yield opened.enter_context(SqliteSaver.from_conn_string(self.at)), None
            else:
                from langgraph.checkpoint.postgres import PostgresSaver
                from langgraph.store.postgres import PostgresStore

                saver = opened.enter_context(PostgresSaver.from_conn_string(self.at))
                yield saver, opened.enter_context(PostgresStore.from_conn_string(self.at))

    def set_up(self) -> None:
        """Make the tables: once, before processes that may do so at once."""
        with self.opened() as (saver, store):
            saver.setup()  # type: ignore[attr-defined]
            if store is not None:
                store.setup()  # type: ignore[attr-defined]


def environment() -> dict[str, str]:
    """Of processes that import what the tests do."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "PYTHONHASHSEED": "random"}
