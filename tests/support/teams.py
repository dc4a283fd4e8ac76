"""Random graphs of workers, synthesizers, adapters, tools and thoughts, for what `visible_graphs` does not draw."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from langchain_core.tools import tool
from langgraph.prebuilt import ToolNode

from choreo_agents import END, START, Agent, ChoreoGraph, Sampling, Send, Synthesizer, Worker
from choreo_agents.models import load_model
from choreo_agents.pml import Schema
from choreo_agents.synthesis.placing import STRATEGIES, Strategy
from support.adapters import save_adapter, save_mapper
from support.interference import WARN
from support.tiny import save_tiny_llama
from support.tool_templates import tool_tokenizer
from support.visible_graphs import HOUSE, IMPORTS, State

TUNED = "tuned"
SAYING = Sampling(temperature=1.0, max_tokens=5, stop_tokens=())


@tool
def count() -> int:
    """Count all things."""
    return 3


@dataclass(frozen=True)
class Team:
    """Workers beside Ann, the judge who merges them all, whoever calls a tool, and Bob; as many rounds of them."""

    strategy: Strategy
    n: int
    instances: int
    rounds: int
    mode: str
    """In which Bob reads the judge; `caller` by whoever calls a tool, if anybody does."""
    caller: str | None
    is_tuned: bool
    """Whether the judge speaks with an adapter that maps what it merges."""
    thinks: bool
    confidential: bool
    has_schema: bool
    """Whether Bob is told by a module of a schema."""

    def graph(self) -> ChoreoGraph:
        graph = ChoreoGraph(State, system="Root.", policy=WARN)
        worker = Worker("worker", n=self.n, system="Notes: Ann has 3 red kites.", sampling=SAYING)
        ann = Agent("ann", system="You are Ann.", confidential=self.confidential, sampling=SAYING, **self._thinking)
        judge = Synthesizer(
            "judge",
            merges=["worker", "ann"],
            strategy=self.strategy,
            adapter=TUNED if self.is_tuned else None,
            sampling=SAYING,
            thinking=False,
        )
        house = Schema.from_text(HOUSE.format(cellar=3, box=3)).prompt(IMPORTS["hall"])
        bob = Agent("bob", prompt=house if self.has_schema else "Tell, Bob.", sampling=SAYING, **self._thinking)
        worker.thinking = False
        for agent in (worker, ann, judge, bob):
            graph.add_node(agent)
        instances, rounds = self.instances, self.rounds

        def route(state: State) -> list[Send]:
            return [worker.send(state, f"Write part {number}.") for number in range(instances)]

        def clock(state: State) -> dict[str, int]:
            return {"rounds": state.get("rounds", 0) + 1}

        def again(state: State) -> list[str]:
            return ["ann", "gate"] if state.get("rounds", 0) < rounds else [END]

        graph.add_node("gate", lambda _: None).add_node("clock", clock)
        graph.add_edge(START, "ann").add_edge(START, "gate")
        graph.add_conditional_edges("gate", route, ["worker"])
        graph.add_edge(["ann", "worker"], "judge")
        self._behind(graph)
        graph.add_edge("bob", "clock").add_conditional_edges("clock", again, ["ann", "gate", END])
        return graph

    @property
    def _thinking(self) -> dict[str, Any]:
        return {"thinking": 4 if self.thinks else False}

    def _behind(self, graph: ChoreoGraph) -> None:
        """Who reads the judge."""
        if self.caller is None:
            graph.add_edge("judge", "bob", visibility=self.mode)  # type: ignore[arg-type]
            return
        graph.add_node(
            Agent("cal", tools=[count], tool_choice="count", thinking=False, sampling=Sampling(max_tokens=90))
        )
        graph.add_node("tools", ToolNode([count]))
        graph.add_edge("judge", "cal", visibility=self.caller).add_edge("cal", "tools")  # type: ignore[arg-type]
        graph.add_edge("tools", "bob").set_visibility("judge", "bob", mode=self.mode).set_visibility("cal", "bob")  # type: ignore[arg-type]


@st.composite
def teams(draw: st.DrawFn, *, plain: bool = False) -> Team:
    """Any team; with `plain`, all that is decoded is what a node says, by the model alone."""
    modes = st.sampled_from(["shared", "reencoded"])
    return Team(
        draw(st.sampled_from([each for each in STRATEGIES if not plain or each != "summary"])),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(modes),
        draw(st.none() | modes),
        not plain and draw(st.booleans()),
        not plain and draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def save_team_model(folder: Path) -> tuple[Path, Path]:
    """A random model that thinks and calls tools, and an adapter of it with a cache mapper."""
    tokenizer = tool_tokenizer("Qwen 3")
    model = save_tiny_llama(
        folder / "model",
        tokenizer=tokenizer,
        eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=8192,
        num_hidden_layers=2,
    )
    adapter = save_adapter(folder / TUNED, model)
    save_mapper(adapter, load_model(model))
    return model, adapter
