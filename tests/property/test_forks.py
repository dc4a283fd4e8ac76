"""Forks of random graphs: what is computed again is what the audit says that a change can reach."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.interference import QUESTION, WARN, contexts_of, models, unreached
from support.visible_graphs import Spec, specs

from choreo_agents import Engine, Memory, RunOptions, fork, replay
from choreo_agents.graph.replaying import ReplayReport
from choreo_agents.models import LoadedModel

# Declared-private pairs are broken on purpose here: the audit is asked, not obeyed.
pytestmark = pytest.mark.filterwarnings("ignore::choreo_agents.errors.VisibilityWarning")


@pytest.fixture(autouse=True)
def _model(tiny: LoadedModel) -> None:
    models["tiny"] = tiny


def forked(spec: Spec, seed: int, *changes: dict[str, str], confidential: bool = True) -> list[ReplayReport]:
    """Record a run, and fork it, once for each change."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine.load(models["tiny"], memory=Memory(kv_budget_bytes=1 << 23)) as engine,
    ):
        app, path = spec.graph(WARN).compile(engine=engine), Path(folder) / "run.jsonl"
        with engine.record(path, confidential=confidential):
            app.invoke(QUESTION, {"configurable": {"choreo": RunOptions(seed=seed)}})
        return [fork(app, path, set=change) for change in changes]


@given(specs(), st.integers(0, 99), st.data())
@settings(max_examples=12, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_a_fork_computes_what_the_audit_says_that_it_reaches(spec: Spec, seed: int, data: st.DataObject) -> None:
    importing = {speaker.persona for speaker in spec.speakers if speaker.imports}
    systems = [name for name in contexts_of(spec, spec.graph(WARN).audit()) if name.endswith(".system")]
    systems = [name for name in systems if name.removesuffix(".system") not in importing]
    assume(systems)
    context = data.draw(st.sampled_from(systems))
    persona = context.removesuffix(".system")
    report = spec.graph(WARN).with_system(persona, "x").audit()
    free = unreached(spec, report, context, "encoding", "words")
    none, other = forked(spec, seed, {}, {context: f"{persona} has 7 old red kites."})
    assert {call.outcome for call in none.calls} <= {"taken"} and none.sampled == 0
    computed = {call.place[0] for call in other.calls if call.outcome != "taken"}
    assert not computed & free, f"{context} was not to reach {computed & free}"
    assert {call.place[0] for call in other.changed} <= computed
    assert (
        {call.place[0] for call in other.calls}
        >= computed
        >= {speaker.name for speaker in spec.speakers if speaker.persona == persona}
    )
    assert other.sampled == sum(call.sampled for call in other.calls)


@given(specs(), st.integers(0, 99))
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
def test_masked_words_are_said_again(spec: Spec, seed: int) -> None:
    """What confidential speakers said is decoded again, and says the same; all else is taken."""
    [report] = forked(spec, seed, {}, confidential=False)
    hidden = {speaker.name for speaker in spec.speakers if speaker.confidential}
    assert all(call.outcome == ("same" if call.place[0] in hidden else "taken") for call in report.calls)
    assert report.same


@given(specs(), st.integers(0, 99))
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
def test_random_graphs_are_run_again(spec: Spec, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with Engine.load(models["tiny"], memory=Memory(kv_budget_bytes=1 << 23)) as engine:
            app = spec.graph(WARN).compile(engine=engine)
            with engine.record(path, confidential=True):
                app.invoke(QUESTION, {"configurable": {"choreo": RunOptions(seed=seed)}})
            report = replay(app, path)
            assert report.same and report.sampled == 0, report
