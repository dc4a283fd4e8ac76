"""What engines elsewhere have run is played again by an engine that computes here."""

from __future__ import annotations

from pathlib import Path

import pytest
from choreo_ray.remote import EngineServer, engine_over

from choreo_agents import START, Agent, ChoreoGraph, Engine, Sampling, fork, replay
from choreo_agents.errors import ReplayError


def test_a_front_without_weights_plays_nothing_and_says_what_does(tmp_path: Path) -> None:
    graph = ChoreoGraph()
    graph.add_node(Agent("ann", prompt="Speak.", sampling=Sampling(max_tokens=6)))
    graph.add_edge(START, "ann")
    question = {"messages": [("user", "What is 2 plus 3?")]}
    with Engine.load("embedded") as here:
        with engine_over([EngineServer(here.owner, "a")], "embedded") as front:
            app = graph.compile(engine=front)
            with front.record(tmp_path / "run.jsonl"):
                said = app.invoke(question)["messages"][-1].text
            refused = pytest.raises(
                ReplayError, match=r"is run by engines elsewhere.*Engine\.load\(\) of the same model"
            )
            with refused:
                replay(app, tmp_path / "run.jsonl")
            with refused:
                fork(app, tmp_path / "run.jsonl", set={"ann.prompt": "Whisper."})
        report = replay(graph.compile(engine=here), tmp_path / "run.jsonl")
        assert report.same and said
