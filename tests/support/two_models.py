"""Graphs whose agents run on models that have nothing in common: other weights, another tokenizer, another template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from choreo_agents import END, START, Agent, ChoreoGraph, Engine, MessageHandle, RunOptions, Sampling
from choreo_agents.graph.state import handles_of

WORDS = {"ann": "Ann has 3 red kites.", "bob": "Bob has 2 blue cups.", "carl": "Carl has 4 green hats."}
ASKED: dict[str, Any] = {"messages": [("user", "What does Ann have?")]}
SHORT = Sampling(max_tokens=24, stop_tokens=())


def speaker(name: str, engine: str | Engine, **options: Any) -> Agent:
    """An agent of one of the models."""
    return Agent(name, engine=engine, **({"sampling": SHORT} | options))


def chain(agents: Sequence[Agent], **options: Any) -> ChoreoGraph:
    """Agents one after the other, each of which sees all before it; `options` as of the last edge."""
    graph = ChoreoGraph(system="Agents read their notes.")
    for at, agent in enumerate(agents):
        graph.add_node(agent)
        graph.add_edge(agents[at - 1].name if at else START, agent.name, **(options if at else {}))
        for before in agents[: max(0, at - 1)]:
            graph.set_visibility(before.name, agent.name, options.get("visibility", "shared"))
    graph.add_edge(agents[-1].name, END)
    return graph


class Said(Mapping[tuple[str, int, int, int], tuple[int, ...] | None]):
    """Makes every agent say its words, in the tokens of its own model.

    Args:
        engines: By agent.
        words: By agent.
    """

    def __init__(self, engines: Mapping[str, Engine], words: Mapping[str, str] = WORDS) -> None:
        self._engines = engines
        self._words = words

    def __getitem__(self, call: tuple[str, int, int, int]) -> tuple[int, ...] | None:
        name = call[0].rpartition("|")[2]
        model = self._engines[name].model
        # As a template writes it: behind the name of who speaks.
        turn = model.encode(model.chat.turn("assistant", self._words[name], name))
        header, end = model.encode(model.chat.header(name)), model.encode(model.chat.turn_end)
        return tuple(turn[len(header) : len(turn) - len(end)])

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def saying(engines: Mapping[str, Engine], words: Mapping[str, str] = WORDS, **configurable: Any) -> Any:
    """The config of a run in which all agents say their words."""
    return {"configurable": {"choreo": RunOptions(seed=1, replay=Said(engines, words)), **configurable}}


def entry_of(state: Mapping[str, Any], author: str) -> Mapping[str, Any]:
    """The last that an author has said."""
    return [entry for entry in state["handles"] if entry["author"] == author][-1]


def seen_by(engine: Engine, state: Mapping[str, Any], author: str) -> str:
    """All that an author's last message attended to, as its model reads it."""
    handle = MessageHandle.model_validate(entry_of(state, author)["handle"])
    made = {each.handle.id: each for each in engine.inspect.records([handle])}
    parents = [made[parent.id] for parent in made[handle.id].parents]
    return "".join(engine.model.decode(list(each.tokens)) for each in parents)


def models_of(entries: Iterable[Mapping[str, Any]]) -> list[set[str]]:
    """The models that have an encoding of each entry."""
    return [{handle.base_model for handle in handles_of(entry)} for entry in entries]
