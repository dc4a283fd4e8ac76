"""Several agents, some of them side by side, over a few turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from choreo_agents.graph import END, START, Agent, ChoreoGraph
from choreo_agents.lab.language import vocabulary
from choreo_agents.sampling import Sampling

PLANNER, WRITER = "planner", "writer"


@dataclass(frozen=True)
class DurableLengths:
    """How much is said."""

    turns: int = 4
    """Questions of a user, in one thread."""
    workers: int = 4
    """Agents that answer side by side."""
    task: int = 64
    """Words of a question, and of a system prompt."""
    answer: int = 48
    """Tokens of each answer."""

    @property
    def calls(self) -> int:
        """Of all turns."""
        return self.turns * (self.workers + 2)


def team(lengths: DurableLengths, number: int) -> ChoreoGraph:
    """A planner, workers side by side, and a writer; everybody reads everybody."""
    graph = ChoreoGraph(system=_words(number, "all", lengths.task), visibility="shared")
    workers = [f"worker {place}" for place in range(lengths.workers)]
    sampling = Sampling(temperature=0.0, max_tokens=lengths.answer, stop_tokens=())
    for name in (PLANNER, *workers, WRITER):
        graph.add_node(Agent(name, system=_words(number, name, lengths.task), sampling=sampling))
    for name in workers:
        graph.add_edge(PLANNER, name)
    return graph.add_edge(START, PLANNER).add_edge(workers, WRITER).add_edge(WRITER, END)


def questions(lengths: DurableLengths, number: int) -> Sequence[str]:
    """What the user asks, turn by turn: other words in each round."""
    return [_words(number, f"turn {turn}", lengths.task) for turn in range(lengths.turns)]


def _words(number: int, name: str, count: int) -> str:
    return " ".join(random.Random(f"durable {number} {name}").choices(sorted(vocabulary.words()), k=count))
