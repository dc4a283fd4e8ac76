"""Random graphs of agents with private contexts, and runs of them that can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import strategies as st

from choreo_agents import (
    END,
    START,
    Agent,
    ChoreoGraph,
    ChoreoState,
    Engine,
    MessageHandle,
    Policy,
    Rule,
    Sampling,
    VisibilityMode,
)
from choreo_agents.graph.visibility import START_SOURCE, Positions, mode_of
from choreo_agents.pml import Prompt, Schema

NAMES = ("ann", "bob", "cleo", "dan")
HOUSE = """
<schema name="house">
  Look around.
  <module name="hall">Here is a lamp.</module>
  <module name="cellar" confidential="true">
    There are {cellar} bags. <module name="box">One has {box} coins.</module>
  </module>
</schema>
"""
CELLAR, BOX = "house/cellar", "house/cellar/box"
IMPORTS = {"hall": "<hall/>", "cellar": "<hall/><cellar/>", "box": "<cellar><box/></cellar> Be quick, {name}."}
SPEAKING = Sampling(temperature=1.0, max_tokens=3, stop_tokens=(), logprobs=8)


class State(ChoreoState, total=False):
    """Rounds that are over."""

    rounds: int


@dataclass(frozen=True)
class Speaker:
    """An agent of a random graph."""

    name: str
    persona: str
    has_system: bool
    has_prompt: bool
    confidential: bool
    imports: str = ""
    """Which modules it is told by, instead of words: one of `IMPORTS`."""


@dataclass(frozen=True)
class Spec:
    """A graph as plain data."""

    speakers: tuple[Speaker, ...]
    rules: Mapping[tuple[str, str], Rule]
    """By source and reader."""
    layers: tuple[tuple[str, ...], ...]
    rounds: int
    positions: Positions = "sequential"
    numbers: Mapping[str, int] = field(default_factory=dict)
    """What stands in the system prompt of each persona, and in each confidential module."""

    def graph(self, policy: Policy | None = None) -> ChoreoGraph:
        """The graph: layers one after the other, as many rounds of them."""
        graph = ChoreoGraph(State, system="Root.", policy=policy, positions=self.positions)
        for speaker in self.speakers:
            number = self.numbers.get(speaker.persona, 3)
            system = f"{speaker.persona} has {number} red kites." if speaker.has_system else None
            agent = Agent(
                speaker.name,
                system=None if speaker.imports else system,
                prompt=self._told(speaker, system),
                persona=speaker.persona,
                confidential=speaker.confidential,
                sampling=SPEAKING,
                reads={source: rule for (source, reader), rule in self.rules.items() if reader == speaker.name},
            )
            graph.add_node(speaker.name, agent)
        for name in self.layers[0]:
            graph.add_edge(START, name, visibility={})
        for before, after in zip(self.layers, self.layers[1:], strict=False):
            for name in after:
                graph.add_edge(list(before), name, visibility={})
        rounds, first = self.rounds, list(self.layers[0])

        def count(state: State) -> dict[str, int]:
            return {"rounds": state.get("rounds", 0) + 1}

        def again(state: State) -> list[str]:
            return first if state.get("rounds", 0) < rounds else [END]

        graph.add_node("clock", count)
        graph.add_edge(list(self.layers[-1]), "clock", visibility={})
        graph.add_conditional_edges("clock", again, [*first, END], visibility={})
        return graph

    def _told(self, speaker: Speaker, system: str | None) -> str | Prompt | None:
        if speaker.imports:
            text = HOUSE.format(cellar=self.numbers.get(CELLAR, 3), box=self.numbers.get(BOX, 3))
            own = f"<system>{system}</system>" if system else ""
            return Schema.from_text(text).prompt(IMPORTS[speaker.imports].format(name=speaker.persona) + own)
        return f"Tell, {speaker.name}." if speaker.has_prompt else None


class Forced(Mapping[tuple[str, int, int, int], Any]):
    """Tokens for every call, drawn by its name; those of some authors are drawn anew, and some speak freely."""

    def __init__(
        self,
        seed: int,
        changed: frozenset[str] = frozenset(),
        length: int = 3,
        free: frozenset[str] = frozenset(),
    ) -> None:
        self.seed, self.changed, self.length, self.free = seed, changed, length, free

    def __iter__(self) -> Iterator[tuple[str, int, int, int]]:
        return iter(())

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: tuple[str, int, int, int]) -> tuple[int, ...] | None:
        if key[0] in self.free:
            return None
        other = key[0] in self.changed
        digest = hashlib.sha256(f"{self.seed} {key} {other}".encode()).digest()
        rng = Random(digest)
        return tuple(rng.randrange(10, 300) for _ in range(self.length if other else 3))


def heard(engine: Engine, state: Mapping[str, Any]) -> dict[tuple[str, int], list[Any]]:
    """The model's distribution for every token of every message, by author and superstep."""
    found = {}
    for entry in state["handles"]:
        if entry["author"] != START_SOURCE:
            handle = MessageHandle.model_validate(entry["handle"])
            found[entry["author"], entry["superstep"]] = [
                (chosen.logprob, chosen.top) for chosen in engine.logprobs(handle)
            ]
    return found


OWN = (VisibilityMode("loud", "words", reword=str.upper), VisibilityMode("plainly", "encoding"))
"""Modes that no graph knows by name."""
MODES = ("shared", "shared", "reencoded", "reencoded", "private", None, None, None)


@st.composite
def specs(draw: st.DrawFn, *, personas: bool = True, modes: Sequence[Any] = MODES) -> Spec:
    """Two to four agents, two or three layers, any rules of these modes; None: nothing is declared."""
    names = NAMES[: draw(st.integers(2, 4))]
    speakers = []
    for index, name in enumerate(names):
        shares = personas and index > 0 and draw(st.integers(0, 3)) == 0
        persona = speakers[0].persona if shares else name
        flags = [draw(st.booleans()) for _ in range(3)]
        imports = draw(st.sampled_from(["", "", "", *IMPORTS]))
        speakers.append(Speaker(name, persona, flags[0] or index == 0, flags[1], flags[2], imports))
    owners = {speaker.persona for speaker in speakers if speaker.has_system or speaker.has_prompt}
    systems = {speaker.persona for speaker in speakers if speaker.has_system and not speaker.imports}
    contexts = [f"{persona}.system" for persona in sorted(owners & systems)]
    contexts += [speaker.name for speaker in speakers if speaker.confidential]
    rules: dict[tuple[str, str], Rule] = {}
    for reader in names:
        for source in names:
            mode = draw(st.sampled_from(modes))
            if source == reader or mode is None:
                continue
            history = draw(st.sampled_from(["all", "all", "last", 2]))
            scope: Any = "reader"
            if mode_of(mode).encodes_again:
                plain = st.sampled_from(["reader", "reader", "public"])
                named = st.lists(st.sampled_from(contexts or ["none"]), min_size=1, max_size=2, unique=True).map(tuple)
                scope = draw(plain | named if contexts else plain)
            rules[source, reader] = Rule(mode, history, scope)
        start = draw(st.sampled_from(["shared", "shared", "reencoded"]))
        rules[START_SOURCE, reader] = Rule(start)
    cut = draw(st.integers(1, len(names) - 1))
    order = draw(st.permutations(names))
    layers = (tuple(order[:cut]), tuple(order[cut:]))
    positions: Positions = draw(st.sampled_from(["sequential", "parallel"]))
    return Spec(tuple(speakers), rules, layers, draw(st.integers(1, 2)), positions)
