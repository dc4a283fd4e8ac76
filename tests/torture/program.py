"""What torture runs, as plain data: two random graphs, how their agents think and speak, and what happens to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from support.visible_graphs import MODES, OWN, Spec, specs

from choreo_agents import Sampling
from torture.minds import PLAIN, Minds, minds

_PLAIN: dict[str, Any] = {"temperature": 1.0, "max_tokens": 3, "stop_tokens": ()}
SPEECH: Mapping[str, Sampling] = {
    "freely": Sampling(**_PLAIN),
    "one of some": Sampling(temperature=1.0, max_tokens=8, choices=("A", "BC", "BCD")),
    "guided": Sampling(temperature=1.0, max_tokens=8, constraint={"regex": "[A-D]{2,4}"}),
    "JSON": Sampling(
        temperature=1.0, max_tokens=40, constraint={"json_schema": {"enum": [{"box": 1}, {"box": 12}, []]}}
    ),
}
FAMILIES = (PLAIN, PLAIN, ("Qwen 3", "GLM-4.5"), ("GLM-4.5", "Qwen 3"), ("recalls", "Qwen 3"))
"""Of two models, as often as they are drawn: all but the plain ones think, and all but `recalls` call tools."""
MODELS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((0,), (0,)),
    "each": ((0,), (1,)),
    "both": ((0, 1), (0, 1)),
}
"""Which of them serve each tenant: one both tenants, each its own, or both in every graph."""
ENGINES = ("one", "two")
"""Names of a graph's engines."""


@dataclass(frozen=True)
class Program:
    """What is run, and what happens to it."""

    specs: tuple[Spec, Spec]
    """A graph for each tenant, ..."""
    minds: tuple[Minds, Minds]
    """... and what its agents do before they speak."""
    families: tuple[str, str]
    """Of the two models."""
    speech: str
    """How agents speak: one of `SPEECH`."""
    forged: str
    """What the first tenant's input says besides: nothing, that it is an agent's, or handles that nobody has made."""
    tokens: int
    """That the pool has room for, if they are words, ..."""
    host: int
    """... and the bytes of the host, ..."""
    on_disk: bool
    """... and whether there is a disk."""
    models: str
    """Which models serve whom: one of `MODELS`."""
    faults: tuple[int, ...]
    """Seeds of faults, one of which is there at each try."""
    restarts: bool
    """Whether the engine is started again between tries."""
    cancels: tuple[float, ...]
    """Seconds after which tries are cancelled."""
    seed: int

    @property
    def room(self) -> int:
        """Tokens that a pool has room for: of models whose tokens are single bytes, more."""
        return self.tokens * (1 if "plain" in self.families else 4)

    def serving(self, number: int) -> tuple[int, ...]:
        """The models that serve a tenant."""
        return MODELS[self.models][number]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any."""
    graphs = specs() | specs(modes=(*MODES, *OWN))
    both = draw(graphs), draw(graphs)
    families = draw(st.sampled_from(FAMILIES))
    models = draw(st.sampled_from(["one", "each", "both", "both"]))
    one, other = (draw(minds(both[number], [families[at] for at in MODELS[models][number]])) for number in range(2))
    return Program(
        specs=both,
        minds=(one, other),
        families=families,
        speech=draw(st.sampled_from(["freely", "freely", *SPEECH])),
        forged=draw(st.sampled_from(["nothing", "nothing", "an author", "a handle", "nonsense"])),
        tokens=draw(st.sampled_from([352, 512, 1024])),
        host=draw(st.sampled_from([0, 1 << 16, 1 << 22])),
        on_disk=draw(st.booleans()),
        models=models,
        faults=tuple(draw(st.lists(st.integers(0, 999), max_size=4))),
        restarts=draw(st.booleans()),
        cancels=tuple(draw(st.lists(st.sampled_from([0.005, 0.05, 0.2]), max_size=2))),
        seed=draw(st.integers(0, 99)),
    )
