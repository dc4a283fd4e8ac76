"""Kills actors under runs of graphs, at random moments, and looks whether each run ends with the words it should have.

    make chaos                                    100 runs with an engine killed
    make chaos OPTIONS="--engines 20 --seed 3 --folder chaos"

A run has the words of the same run on one engine of this process, which nobody kills: in fp32 there is no other choice.
What was computed again is counted; a run that has not ended after two minutes hangs. It can be stopped, and goes on
where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from choreo_agents import ChoreoGraph, Engine, Memory, MessageHandle, RunOptions, Sampling
from choreo_agents.errors import EngineLostError
from choreo_agents.tracing import EngineDown, EventList, KVCopied, RequestRouted
from choreo_agents.workflows import debate
from choreo_agents.workflows.graphs.branch_solve_merge import branch_solve_merge
from choreo_agents.workflows.graphs.tree_of_thoughts import tree_of_thoughts

HANG_S = 120.0
"""Seconds after which a run that has not ended counts as one that never will."""
_SAYING = Sampling(temperature=1.0, max_tokens=48, stop_tokens=())
_PARTS = ["Part 1.", "Part 2.", "Part 3."]
QUESTION = {"messages": [("user", "What does Ann have?")]}
GRAPHS: dict[str, Callable[[], ChoreoGraph]] = {
    "debate": lambda: debate({"alice": None, "bruno": None, "carla": None}, rounds=3, sampling=_SAYING),
    "tree": lambda: tree_of_thoughts(branches=3, voters=2, depth=2, keep=2, system="Root.", sampling=_SAYING),
    "parts": lambda: branch_solve_merge(_PARTS, plan="Plan.", merge="All.", sampling=_SAYING),
}
Said = list[tuple[str, str]]


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    number: int
    graph: str
    killed: bool
    """Whether an engine was killed before the run had ended."""
    ended: bool
    same: bool
    """Whether it has said what it should."""
    error: str
    placed: int
    """Calls, those counted again that were placed again."""
    lost: int
    """Engines that the front has seen go."""
    encoded: int
    again: int
    """Tokens."""
    copied: int
    """Bytes of KV."""
    took_s: float


class Chaos:
    """Runs graphs over engines that are killed.

    Args:
        front: Over actors.
        events: Its.
        pids: Finds the process of each engine that is there.
        seed: Of all that is drawn.
    """

    def __init__(self, front: Engine, events: EventList, pids: Callable[[], list[int]], seed: int) -> None:
        self.front, self._events, self._pids, self._seed = front, events, pids, seed
        self._expected: dict[tuple[str, int], Said] = {}
        self._took: dict[str, float] = {}
        self._alone = Engine.load("embedded", memory=Memory(kv_budget_bytes=1 << 26))

    def close(self) -> None:
        """The front is whoever's made it."""
        self._alone.close()

    def run(self, number: int) -> Outcome:
        """Run a graph once, and kill one of its engines meanwhile."""
        random = Random(f"{self._seed} {number}")
        name, seed = random.choice(sorted(GRAPHS)), random.randrange(6)
        expected = self._words(name, seed)
        self._events.events.clear()
        before, found, errors = self.front.stats(), list[Said](), list[BaseException]()

        def play() -> None:
            try:
                found.append(said(self.front, name, seed))
            except BaseException as error:  # told below
                errors.append(error)

        started = time.perf_counter()
        playing = threading.Thread(target=play, daemon=True)
        playing.start()
        playing.join(random.random() * self._took.get(name, 1.0))
        killed = playing.is_alive() and self._kill(random)
        playing.join(HANG_S)
        took_s = time.perf_counter() - started
        if not killed and not errors:
            self._took[name] = took_s
        events, after = self._events.events, self.front.stats()
        return Outcome(
            number,
            name,
            killed,
            not playing.is_alive(),
            found == [expected],
            "; ".join(map(repr, errors)),
            sum(isinstance(event, RequestRouted) for event in events),
            sum(isinstance(event, EngineDown) for event in events),
            after.tokens_encoded - before.tokens_encoded,
            after.tokens_recomputed - before.tokens_recomputed,
            sum(event.bytes for event in events if isinstance(event, KVCopied)),
            took_s,
        )

    def _words(self, name: str, seed: int) -> Said:
        if (name, seed) not in self._expected:
            self._expected[name, seed] = said(self._alone, name, seed)
        return self._expected[name, seed]

    def _kill(self, random: Random) -> bool:
        there = self._pids()
        if not there:
            return False
        try:
            os.kill(random.choice(there), signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


def said(engine: Engine, graph: str, seed: int) -> Said:
    """Who says what in a run."""
    config: Any = {"configurable": {"choreo": RunOptions(seed=seed)}}
    with engine.scope():
        state = GRAPHS[graph]().compile(engine=engine).invoke(QUESTION, config)
        handles = [(entry["author"], MessageHandle.model_validate(entry["handle"])) for entry in state["handles"]]
        return [(author, engine.text(handle)) for author, handle in handles]


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=100, help="runs that have an engine killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(".chaos"), help="of the journal")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    journal = options.folder / f"seed-{options.seed}.jsonl"
    known = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    events = EventList()
    from torture.chaos_actors import started

    with started(events) as (front, pids):
        chaos = Chaos(front, events, pids, options.seed)
        while sum(each["killed"] for each in known) < options.engines:  # under way when one of theirs was
            outcome = chaos.run(len(known))
            with journal.open("a") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")
            known.append(asdict(outcome))
            sys.stdout.write(f"{outcome}\n")
            sys.stdout.flush()
            if not outcome.ended:
                break  # whatever holds it would hold the next
        chaos.close()
    counts = counted(known)
    sys.stdout.write(json.dumps(counts, indent=2) + "\n")
    sys.stdout.write(f"in {sum(each['took_s'] for each in known) / 60:.1f} minutes of runs\n")
    return 0 if counts["ended"] == counts["runs"] == counts["same"] else 1


def counted(outcomes: Sequence[dict[str, Any]]) -> dict[str, int]:
    """All together."""
    counts: Counter[str] = Counter({"runs": len(outcomes)})
    for each in outcomes:
        for what in ("killed", "ended", "same", "placed", "lost", "encoded", "again", "copied"):
            counts[what] += each[what]
        counts["hang"] += not each["ended"]
        counts["refused for what they end"] += EngineLostError.__name__ in each["error"]
    return dict(counts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
