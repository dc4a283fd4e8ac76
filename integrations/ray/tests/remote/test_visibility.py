"""Graphs whose calls are run by several engines: what the audit says holds across them, too."""

from __future__ import annotations

from collections import Counter
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
from choreo_ray.remote.routing import route
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from remote_support.loopback import apart, encoding_apart, load_loopback
from support.interference import WARN, changed, contexts_of, models, run, unreached
from support.visible_graphs import Forced, Spec, specs

from choreo_agents.models import LoadedModel

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::choreo_agents.errors.VisibilityWarning"),
]
whole = attrgetter("context", "reader", "channel", "violation", "path", "cut")
FAR = {name: partial(load_loopback, routing=how) for name, how in [("r", route), ("c", apart), ("e", encoding_apart)]}


@pytest.mark.parametrize("graphs", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_visibility_holds_across_engines(tiny: LoadedModel, record_property: Any, graphs: int) -> None:
    """Said is what one engine says; the same is found of the run; and what cannot reach a reader changes no word."""
    models["tiny"] = tiny
    counts: Counter[str] = Counter()

    @given(specs(), st.integers(0, 99), st.sampled_from(sorted(FAR)), st.data())
    @settings(max_examples=graphs, database=None, derandomize=True, phases=[Phase.generate], deadline=None)
    def compared(spec: Spec, seed: int, how: str, data: st.DataObject) -> None:
        report = spec.graph(WARN).audit()
        channels = ("encoding", "words")
        possible = {context: unreached(spec, report, context, *channels) for context in contexts_of(spec, report)}
        context = data.draw(st.sampled_from([each for each, readers in possible.items() if readers] or [*possible]))
        readers = possible[context]
        one, said, found = run(spec, Forced(seed, free=frozenset(readers)))
        there, said_there, found_there = run(spec, Forced(seed, free=frozenset(readers)), load=FAR[how])
        assert said_there == said and there.keys() == one.keys()
        assert [*map(whole, found_there.findings)] == [*map(whole, found.findings)]
        counts["graphs"] += 1
        counts["messages"] += len(said)
        if not readers:
            return
        other, _ = changed(spec, context)
        authors = frozenset(speaker.name for speaker in spec.speakers) - readers
        _, said_again, _ = run(other, Forced(seed, authors, free=frozenset(readers)), load=FAR[how])
        counts["pairs of runs"] += 1
        for key in said:
            if key[0] in readers:
                counts["pairs of messages"] += 1
                assert said_there[key] == said_again[key], f"{context} reached {key}"

    compared()
    record_property("counts", ", ".join(f"{name}: {count}" for name, count in counts.items()))
    assert counts["graphs"] >= graphs
