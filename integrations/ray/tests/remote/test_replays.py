"""What engines elsewhere have run is run again over its answers, there and by an engine that computes here."""

from __future__ import annotations

from pathlib import Path

from choreo_ray.remote import EngineWorker, remote_engine

from choreo_agents import START, Agent, ChoreoGraph, Engine, Sampling, fork, replay


def test_a_record_of_a_front_is_replayed_and_forked_there_and_here(tmp_path: Path) -> None:
    graph, path = ChoreoGraph(), tmp_path / "run.jsonl"
    graph.add_node(Agent("ann", prompt="Speak.", sampling=Sampling(max_tokens=6)))
    graph.add_node(Agent("bob", prompt="Answer.", sampling=Sampling(max_tokens=6)))
    graph.add_edge(START, "ann").add_edge("ann", "bob", visibility="shared")
    with Engine.load("embedded") as here, Engine.load("embedded") as there:
        with remote_engine([EngineWorker(there, "a")], "embedded") as router:
            app = graph.compile(engine=router)
            with router.record(path):
                app.invoke({"messages": [("user", "What is 2 plus 3?")]})
            reports = [(replay(app, path), fork(app, path, set={"bob.prompt": "Whisper."}))]
        app = graph.compile(engine=here)
        reports.append((replay(app, path), fork(app, path, set={"bob.prompt": "Whisper."})))
    for again, changed in reports:
        assert again.same and again.sampled == 0 and again.taken > 0
        assert [call.outcome == "taken" for call in changed.calls] == [True, False]
    assert len({changed.calls[1].words for _, changed in reports}) == 1
