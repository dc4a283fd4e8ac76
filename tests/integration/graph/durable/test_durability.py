"""What a killed process leaves, by LangGraph's `durability`: each line of the table in docs/how-to/durable-runs.md."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.errors import EmptyInputError

from choreo_agents import END, START, Agent, ChoreoGraph, Engine, Memory
from choreo_agents.errors import LineageWarning
from choreo_agents.testing import Script

THREAD: Any = {"configurable": {"thread_id": "1"}}
ASKED: Any = {"messages": [("user", "What does Ann have?")]}
ANSWERS = {"ann": "A red kite.", "bob": "Ann has a kite.", "cleo": "It is red."}
CASES = [
    ("sync", "in the last node"),
    ("sync", "before what Bob has said is saved"),
    ("async", "in the last node"),
    ("async", "before what Bob has said is saved"),
    ("exit", "in the last node"),
]
KILLED = 9


def graph(last: Any) -> ChoreoGraph:
    """Two agents speak, then a function runs, then a third one speaks."""
    graph = ChoreoGraph(system="Be brief.").add_node(Agent("ann")).add_node(Agent("bob")).add_node(Agent("cleo"))
    graph.add_node("last", last)
    graph.add_edge(START, "ann").add_edge("ann", "bob").add_edge("bob", "last").add_edge("last", "cleo")
    return graph.set_visibility("bob", "cleo").add_edge("cleo", END)


def engine_of(script: Script) -> Engine:
    return script.load(memory=Memory(kv_budget_bytes=1 << 22), salt="s")


def die(*_: Any) -> Any:
    os._exit(KILLED)


class DyingSaver(SqliteSaver):
    """Is killed when it is to save what Bob has said; of the checkpoint behind that nothing is saved, either."""

    def put_writes(self, config: Any, writes: Any, *rest: Any, **options: Any) -> None:
        if "Ann has a kite." in str(writes):
            die()
        super().put_writes(config, writes, *rest, **options)


def run_and_die(folder: Path, durability: Any, where: str) -> None:
    """What a process does until it is killed."""
    kind = SqliteSaver if where == "in the last node" else DyingSaver
    with kind.from_conn_string(str(folder / "states")) as saver, engine_of(Script(ANSWERS)) as engine:
        graph(die).compile(saver, engine=engine).invoke(ASKED, THREAD, durability=durability)


PROCESS = """
import os, sys
from pathlib import Path
from integration.graph.durable import test_durability as module
for number, (durability, where) in enumerate(module.CASES):
    child = os.fork()
    if child == 0:
        module.run_and_die(Path(sys.argv[1]) / str(number), durability, where)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """What each case has left."""
    folder = tmp_path_factory.mktemp("killed")
    places = {case: folder / str(number) for number, case in enumerate(CASES)}
    for place in places.values():
        place.mkdir()
    tests = str(Path(__file__).parents[3])
    path = os.pathsep.join([tests, *sys.path]).strip(os.pathsep)
    command = [sys.executable, "-c", PROCESS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False)
    assert done.stdout.split() == [str(KILLED)] * len(CASES), done.stderr
    return places


class Resumed:
    """A process that goes on."""

    def __init__(self, folder: Path) -> None:
        self.script, self.folder = Script(ANSWERS), folder
        self.ran = list[str]()

    def invoke(self, given: Any) -> Any:
        def last(state: Any) -> dict[str, Any]:
            self.ran.append("last")
            return {}

        with (
            SqliteSaver.from_conn_string(str(self.folder / "states")) as saver,
            engine_of(self.script) as engine,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error", LineageWarning)
            return graph(last).compile(saver, engine=engine).invoke(given, THREAD)

    @property
    def asked(self) -> list[str]:
        """Who has spoken, and was not found."""
        return [str(call.agent) for call in self.script.calls]


def texts(state: Any) -> list[str]:
    return [message.text for message in state["messages"][1:]]


@pytest.fixture
def resumed(request: pytest.FixtureRequest, folders: dict[tuple[str, str], Path]) -> Iterator[Resumed]:
    yield Resumed(folders[request.param])


@pytest.mark.parametrize("resumed", [case for case in CASES if case[0] != "exit"], ids=" ".join, indirect=True)
def test_a_killed_run_goes_on_and_asks_nobody_again(resumed: Resumed) -> None:
    """What was saved runs on; who runs again since nothing was saved of it is found in the lineage."""
    assert texts(resumed.invoke(None)) == list(ANSWERS.values())
    assert resumed.asked == ["cleo"] and resumed.ran == ["last"]


@pytest.mark.parametrize("resumed", [CASES[-1]], ids=" ".join, indirect=True)
def test_under_exit_nothing_is_saved_and_nobody_is_asked_again(resumed: Resumed) -> None:
    """It starts from the state that the thread had before: with what it was given, once more."""
    with pytest.raises(EmptyInputError):
        resumed.invoke(None)
    assert texts(resumed.invoke(ASKED)) == list(ANSWERS.values())
    assert resumed.asked == ["cleo"] and resumed.ran == ["last"]
