"""Runs a graph with lineage and without, in pairs, and counts what is written."""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from choreo_agents.engine import Engine, Memory
from choreo_agents.graph.durable.beside import SUFFIX, opened
from choreo_agents.graph.durable.lineage_store import commits_of
from choreo_agents.lab.experiments.bench_durable.graph import DurableLengths, questions, team
from choreo_agents.lab.rivals.saved_states import bytes_by_channel, saved_states
from choreo_agents.models import LoadedModel
from choreo_agents.training.journal import Journal, Record

Lasting = Literal["on", "off"]
LASTING: tuple[Lasting, ...] = get_args(Lasting)
CHANNELS = ("messages", "handles")
KINDS = ("rows", "notes", "answers", "holders")
REST_S = 0.2
"""Between two runs: the threads of the one before may spin for a while."""
WARM_UP = DurableLengths(1, 2, 4, 4)
"""Of a run of each kind that is not timed."""
_ENGINES_THREAD = "choreo-engine"


@dataclass(frozen=True)
class DurableRun:
    """What one run of all turns cost."""

    engine_s: float
    """CPU time of the engine's thread."""
    process_s: float
    """CPU time of all threads of the process."""
    wall_s: float
    calls: int
    tokens: int
    """That were decoded."""
    commits: int
    messages: int
    """That the file of lineage has rows of."""
    lineage_bytes: Mapping[str, int]
    """By kind; `""`: of the file. Empty if there is none."""
    state_bytes: Mapping[str, int]
    """Of the checkpointer's file, by channel; `""`: of all."""
    said: tuple[str, ...]
    """All messages."""

    def figures(self) -> Record:
        """In JSON's types, without words."""
        return {name: value for name, value in asdict(self).items() if name != "said"}


@dataclass(frozen=True)
class DurableBench:
    """What is run, and on what.

    Args:
        model: Serves both.
        lengths: How much is said.
        seed: Of the words, which are others in each round.
        kv_budget_bytes: Of each engine, which is a fresh one for every run.
    """

    model: LoadedModel
    lengths: DurableLengths = field(default_factory=DurableLengths)
    seed: int = 0
    kv_budget_bytes: int = 1 << 30

    def measure(self, journal: Journal, repeats: int, on_progress: Callable[[str], None] = lambda what: None) -> None:
        """Run what the journal does not hold yet, in pairs; who comes first in one comes second in the next.

        Args:
            journal: Gets a record of each pair.
            repeats: Pairs.
            on_progress: Told of every run that is over, or was before.
        """
        missing = [number for number in range(repeats) if str(number) not in journal]
        for lasting in LASTING if missing else ():
            self.run(lasting, -1, WARM_UP)
        for number in range(repeats):
            runs = dict[Lasting, DurableRun]()
            for lasting in LASTING if number % 2 else reversed(LASTING):
                if number in missing:
                    runs[lasting] = self.run(lasting, number, self.lengths)
                on_progress(f"lineage {lasting}")
            if runs:
                figures = {lasting: run.figures() for lasting, run in runs.items()}
                alike = runs["on"].said == runs["off"].said
                journal.add(str(number), {"round": number, "runs": figures, "alike": alike})

    def run(self, lasting: Lasting, number: int, lengths: DurableLengths) -> DurableRun:
        """All turns of a thread, on an engine and in files of its own."""
        time.sleep(REST_S)
        memory = Memory(kv_budget_bytes=self.kv_budget_bytes)
        with (
            TemporaryDirectory() as folder,
            saved_states(states := Path(folder) / "states") as saver,
            Engine.load(self.model, memory=memory, salt=secrets.token_hex(16)) as engine,
        ):
            place = self.seed + number
            graph = team(lengths, place)
            app = graph.compile(saver, engine=engine, lineage=None if lasting == "on" else False)
            config: Any = {"configurable": {"thread_id": "1"}}
            wall, process = time.perf_counter(), time.process_time()
            for question in questions(lengths, place):
                state = app.invoke({"messages": [("user", question)]}, config)
            wall, process = time.perf_counter() - wall, time.process_time() - process
            spent = engine_seconds()
            lineage = states.with_name(states.name + SUFFIX)
            is_kept = lineage.exists()
            kept = lineage_bytes(lineage) if is_kept else {}
            return DurableRun(
                engine_s=spent,
                process_s=process,
                wall_s=wall,
                calls=lengths.calls,
                tokens=lengths.calls * lengths.answer,
                commits=commits_of(opened(lineage)).count if is_kept else 0,
                messages=kept.pop("messages", 0),
                lineage_bytes=kept,
                state_bytes=bytes_by_channel(saver, CHANNELS),
                said=tuple(str(message.text) for message in state["messages"]),
            )


def engine_seconds() -> float:
    """CPU time of the thread of the engine that was loaded last, since that began."""
    *_, last = (thread for thread in threading.enumerate() if thread.name == _ENGINES_THREAD)
    assert last.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(last.ident))


def lineage_bytes(path: Path) -> dict[str, int]:
    """Of a file of lineage: `""`, all of it with its log; names and values of each kind; and how many `messages`."""
    parts = (path, path.with_name(f"{path.name}-wal"))
    found = {"": sum(part.stat().st_size for part in parts if part.exists())}
    size = "coalesce(sum(length(prefix) + length(key) + length(value)), 0)"
    asked = f"SELECT count(*), {size} FROM store WHERE prefix LIKE ?"
    with closing(sqlite3.connect(path)) as connection:
        for kind in KINDS:
            count, found[kind] = connection.execute(asked, (f"choreo.{kind}.%",)).fetchone()
            found["messages"] = count if kind == "rows" else found["messages"]
    return found
