"""What the audit says, against what happens, on more random graphs than the other tests have time for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.interference import QUESTION, WARN, changed, contexts_of, forged, models, run, unreached
from support.visible_graphs import ECHO, MODES, OWN, Forced, Spec, specs

from choreo_agents.models import LoadedModel
from choreo_agents.runtime.step_trace import StepTrace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore::choreo_agents.errors.VisibilityWarning"),
]
GRAPHS = 320


def test_visibility_non_interference_of_hundreds_of_graphs(tiny: LoadedModel, record_property: Any) -> None:
    """Each finding of a run was foreseen; what cannot reach a reader changes no bit of what it says.

    Every second graph is forced, its function says the same whatever it reads, and contexts that cannot get to a reader
    as encodings are changed; in the others readers decode freely, the function echoes what it reads, and contexts are
    changed that cannot get there in words either. In every second as well, a client speaks in the names of all agents.
    """
    models["tiny"] = tiny
    counts: Counter[str] = Counter()

    @given(specs() | specs(modes=(*MODES, *OWN, *OWN)), st.integers(0, 99), st.booleans(), st.booleans(), st.data())
    @settings(max_examples=GRAPHS, database=None, derandomize=True, phases=[Phase.generate])
    def compared(spec: Spec, seed: int, freely: bool, forges: bool, data: st.DataObject) -> None:
        report = spec.graph(WARN).audit()
        channels = ("encoding", "words") if freely else ("encoding",)
        possible = {context: unreached(spec, report, context, *channels) for context in contexts_of(spec, report)}
        context = data.draw(st.sampled_from([each for each, readers in possible.items() if readers] or [*possible]))
        readers = possible[context]
        free = frozenset(readers if freely else ())
        step_trace, asked = StepTrace(), forged(spec) if forges else QUESTION
        one, said, found = run(spec, Forced(seed, free=free), step_trace, echoing=freely, asked=asked)
        known = {(each.context, each.reader, each.channel) for each in report.findings}
        assert {(each.context, each.reader, each.channel) for each in found.findings} <= known
        counts["graphs"] += 1
        counts["Sends drawn"] += spec.sends
        counts["with a function that speaks"] += any(ECHO in layer for layer in spec.layers)
        counts["with a client that forges"] += forges
        counts["findings foreseen"] += len(found.findings)
        if not readers:
            return
        other, authors = changed(spec, context)
        if freely:
            authors = frozenset(speaker.name for speaker in spec.speakers) - readers
        again = step_trace.replay()
        two, said_again, _ = run(other, Forced(seed, authors, free=free), again, echoing=freely, asked=asked)
        counts["pairs of runs"] += 1
        for key in one:
            if key[0] in readers:
                counts["pairs of messages compared bitwise"] += 1
                assert said[key] == said_again[key] and one[key] == two[key], f"{context} reached {key}"

    compared()
    record_property("counts", ", ".join(f"{name}: {count}" for name, count in counts.items()))
    assert counts["graphs"] >= 300 and counts["Sends drawn"] >= 300 and counts["pairs of runs"] >= 100
    assert counts["with a client that forges"] >= 100
