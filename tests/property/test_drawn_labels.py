"""Labels of drawn edges, against the views of a run: on random graphs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.interference import QUESTION, WARN, models
from support.lineage import parents_of
from support.visible_graphs import ECHO, MODES, OWN, Forced, Spec, specs

from choreo_agents import Engine, Memory, MessageHandle, RunOptions
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.models import LoadedModel

# Declared-private pairs are broken on purpose: then what is shared is encoded again.
pytestmark = pytest.mark.filterwarnings("ignore::choreo_agents.errors.VisibilityWarning")


@pytest.fixture(autouse=True)
def _model(tiny: LoadedModel) -> None:
    models["tiny"] = tiny


@given(specs(personas=False) | specs(personas=False, modes=(*MODES, *OWN)), st.integers(0, 99))
def test_a_view_holds_what_the_labels_of_its_edges_say(spec: Spec, seed: int) -> None:
    spec = replace(spec, sent={})
    with Engine.load(models["tiny"], memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        app = spec.graph(WARN).compile(engine=engine)
        labels = {(edge.source, edge.target): str(edge.data) for edge in app.get_graph().edges if edge.data}
        options = RunOptions(seed=5, replay=Forced(seed))
        entries = asyncio.run(app.ainvoke(QUESTION, {"configurable": {"choreo": options}}))["handles"]
        for entry in entries:
            reader = entry["author"]
            if reader in (START_SOURCE, ECHO):
                continue
            view = parents_of(engine, MessageHandle.model_validate(entry["handle"]))
            ids, authors = ({getattr(record, name) for record in view} for name in ("handle", "author"))
            kept = any(label.startswith("private") for (_, to), label in labels.items() if to == reader)
            for source in {START_SOURCE, ECHO, *(speaker.name for speaker in spec.speakers)} - {reader}:
                earlier = [e for e in entries if e["author"] == source and e["superstep"] < entry["superstep"]]
                said = {MessageHandle.model_validate(each["handle"]) for each in earlier}
                if not said:
                    continue
                label = labels.get((source, reader), "")
                shares = label.startswith(("shared", "plainly"))
                shown = shares or label.startswith(("reencoded", "loud"))
                assert (source in authors) == shown, f"{source} to {reader} is drawn as {label!r}"
                assert not shares or kept or said & ids, (
                    f"{source} to {reader} is drawn as {label!r}, and not attended to"
                )
