"""What the audit says, against what happens: on random graphs, loops, personas, scopes and positions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.interference import QUESTION, WARN, changed, contexts_of, models, run, unreached
from support.tuning import make_tuning
from support.visible_graphs import BOX, MODES, OWN, Forced, Speaker, Spec, key_of, specs

from choreo_agents import Engine, Memory, RunOptions, VisibilityRule
from choreo_agents.graph.audit.report import Finding
from choreo_agents.graph.turn import turn
from choreo_agents.models import LoadedModel
from choreo_agents.runtime.step_trace import StepTrace
from choreo_agents.training.tuning import EvalScore

# Declared-private pairs are broken on purpose here: the audit is asked, not obeyed.
pytestmark = pytest.mark.filterwarnings("ignore::choreo_agents.errors.VisibilityWarning")


@pytest.fixture(autouse=True)
def _model(tiny: LoadedModel) -> None:
    models["tiny"] = tiny


@given(specs() | specs(modes=(*MODES, *OWN, *OWN)), st.integers(0, 99))
def test_visibility_audit_static_covers_dynamic(spec: Spec, seed: int) -> None:
    """All that reached anybody in a run was said beforehand to be able to."""
    static = spec.graph(WARN).audit()
    _, _, dynamic = run(spec, Forced(seed))
    known = {(finding.context, finding.reader, finding.channel) for finding in static.findings}
    found = {(finding.context, finding.reader, finding.channel) for finding in dynamic.findings}
    assert found <= known, f"not foreseen: {found - known}"


@given(specs() | specs(modes=(*MODES, *OWN, *OWN)))
def test_what_a_function_passes_on_is_what_its_sources_would_be_declared_as(spec: Spec) -> None:
    """To the audit, which also covers what then happens: see above."""
    by_hand = replace(spec, passed=frozenset()).graph(WARN).audit()
    passed = replace(spec, passed=frozenset(spec.rules)).graph(WARN).audit()
    assert {*map(_told, passed.findings)} == {*map(_told, by_hand.findings)}
    assert {*passed.blocked} == {*by_hand.blocked}


def _told(finding: Finding) -> tuple[object, ...]:
    return finding.context, finding.reader, finding.channel, finding.violation.partition(":")[0]


@given(specs(), st.integers(0, 99), st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_visibility_non_interference_of_encodings_is_bitwise(spec: Spec, seed: int, data: st.DataObject) -> None:
    """What cannot reach a reader as an encoding changes no bit of its distributions, if all words stay."""
    report = spec.graph(WARN).audit()
    context = data.draw(st.sampled_from(contexts_of(spec, report)))
    readers = unreached(spec, report, context, "encoding")
    assume(readers)
    other, authors = changed(spec, context)
    step_trace = StepTrace()
    one, _, _ = run(spec, Forced(seed), step_trace, echoing=False)
    two, _, _ = run(other, Forced(seed, authors), step_trace.replay(), echoing=False)
    for key in one:
        if key[0] in readers:
            assert one[key] == two[key], f"{context} reached {key}"


@pytest.fixture(scope="module")
def trained(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that was trained on traces of whatever views."""
    folder = tmp_path_factory.mktemp("trained")
    tuning = make_tuning(tiny, folder, judge=lambda _: lambda epoch: EvalScore(float(epoch)), mapper_rank=0)
    tuning.run(lambda passage: None)
    tuning.tuned.save(folder / "adapter")
    return folder / "adapter"


@pytest.mark.slow
@given(specs(), st.integers(0, 99), st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_visibility_non_interference_is_bitwise_after_training(
    trained: Path, spec: Spec, seed: int, data: st.DataObject
) -> None:
    """What a model has learnt opens no way that its views do not have."""
    report = spec.graph(WARN).audit()
    context = data.draw(st.sampled_from(contexts_of(spec, report)))
    readers = unreached(spec, report, context, "encoding")
    assume(readers)
    other, authors = changed(spec, context)
    step_trace = StepTrace()
    one, _, found = run(spec, Forced(seed), step_trace, trained, echoing=False)
    two, _, _ = run(other, Forced(seed, authors), step_trace.replay(), trained, echoing=False)
    known = {(finding.context, finding.reader, finding.channel) for finding in report.findings}
    assert {(each.context, each.reader, each.channel) for each in found.findings} <= known
    for key in one:
        if key[0] in readers:
            assert one[key] == two[key], f"{context} reached {key}"


@given(specs(), st.integers(0, 99), st.data())
@settings(max_examples=12, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_visibility_non_interference_under_any_length_and_schedule(spec: Spec, seed: int, data: st.DataObject) -> None:
    """Elsewhere as exactly as any logits in fp32: kernels change their last bits with the shape of a batch."""
    report = spec.graph(WARN).audit()
    context = data.draw(st.sampled_from(contexts_of(spec, report)))
    readers = unreached(spec, report, context, "encoding", "words")
    assume(readers)
    other, authors = changed(spec, context, 123456)
    forced = Forced(seed, authors, 9)
    one, _, _ = run(spec, Forced(seed))
    two, _, _ = run(other, forced)
    for key in one:
        if key[0] in readers:
            for (a, top), (b, other_top) in zip(one[key], two[key], strict=True):
                assert abs(a - b) <= 1e-4 and abs(top[-1][1] - other_top[-1][1]) <= 1e-4


@given(specs(), st.integers(0, 99), st.data())
@settings(max_examples=12, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_visibility_non_interference_holds_when_decoding_freely(spec: Spec, seed: int, data: st.DataObject) -> None:
    """What is unreachable in both channels changes no word either, whatever those say whom it does reach."""
    report = spec.graph(WARN).audit()
    context = data.draw(st.sampled_from(contexts_of(spec, report)))
    readers = unreached(spec, report, context, "encoding", "words")
    assume(readers)
    influenced = frozenset(speaker.name for speaker in spec.speakers) - readers
    step_trace = StepTrace()
    one, said, _ = run(spec, Forced(seed, free=frozenset(readers)), step_trace)
    other = Forced(seed, influenced, free=frozenset(readers))
    two, said_again, _ = run(changed(spec, context)[0], other, step_trace.replay())
    for key in one:
        if key[0] in readers:
            assert said[key] == said_again[key] and one[key] == two[key], f"{context} reached {key}"


@given(specs(), st.integers(0, 99), st.randoms(use_true_random=False))
@settings(max_examples=12)
def test_visibility_views_do_not_depend_on_who_is_done_first(spec: Spec, seed: int, random: Random) -> None:
    """Nodes of one superstep that start and end in any order see the same, encoded alike."""
    speak = turn.AgentTurn.speak

    async def delayed(self: turn.AgentTurn) -> dict[str, Any]:
        await asyncio.sleep(random.choice([0, 0, 0.002, 0.004]))
        said = await speak(self)
        await asyncio.sleep(random.choice([0, 0, 0.002]))
        return said

    def handles() -> dict[tuple[str, int], str]:
        with Engine.load(models["tiny"], memory=Memory(kv_budget_bytes=1 << 23), salt="s") as engine:
            app = spec.graph(WARN).compile(engine=engine)
            options = {"configurable": {"choreo": RunOptions(seed=5, replay=Forced(seed))}}
            state = asyncio.run(app.ainvoke(QUESTION, options))
            return {key_of(entry): entry["handle"]["id"] for entry in state["handles"]}

    plain = handles()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn.AgentTurn, "speak", delayed)
        assert handles() == plain


PAIR = Spec(
    (Speaker("ann", "ann", True, False, False), Speaker("bob", "bob", True, False, False)),
    {("ann", "bob"): VisibilityRule("reencoded")},
    (("ann",), ("bob",)),
    1,
)


def test_visibility_the_comparison_of_bits_sees_a_module() -> None:
    told = [Speaker("ann", "ann", False, False, False, "box"), Speaker("bob", "bob", True, False, False)]
    for rule, reaches in ((VisibilityRule("shared"), True), (VisibilityRule("reencoded"), False)):
        spec = replace(PAIR, speakers=tuple(told), rules={("ann", "bob"): rule})
        assert (BOX in spec.graph(WARN).audit().reached("bob", "encoding")) == reaches
        for number in (7, 123456):  # as many tokens as before, and more
            step_trace = StepTrace()
            one, _, _ = run(spec, Forced(1), step_trace)
            two, _, _ = run(changed(spec, BOX, number)[0], Forced(1), step_trace.replay() if number == 7 else None)
            assert one["ann", 1, 0] != two["ann", 1, 0]
            if number == 7 or reaches:
                assert (one["bob", 2, 0] != two["bob", 2, 0]) == reaches


@pytest.mark.parametrize("is_trained", [False, True], ids=["untrained", "trained"])
@pytest.mark.parametrize(
    ("rule", "reaches"),
    [
        (VisibilityRule("shared"), True),
        (VisibilityRule("reencoded"), False),
        (VisibilityRule("reencoded", scope="public"), False),
        (VisibilityRule("reencoded", scope=("ann.system",)), True),
        (VisibilityRule(OWN[0]), False),
        (VisibilityRule(OWN[1]), True),
    ],
    ids=str,
)
def test_visibility_the_comparison_of_bits_sees_a_leak(
    trained: Path, rule: VisibilityRule, reaches: bool, is_trained: bool
) -> None:
    """The property above can fail: flip the edge, and the reader's bits change; and the audit says so."""
    spec = replace(PAIR, rules={("ann", "bob"): rule})
    report = spec.graph(WARN).audit()
    assert ("ann.system" in report.reached("bob", "encoding")) == reaches
    step_trace = StepTrace()
    adapter = trained if is_trained else None
    one, _, _ = run(spec, Forced(1), step_trace, adapter)
    two, _, _ = run(changed(spec, "ann.system")[0], Forced(1), step_trace.replay(), adapter)
    if is_trained:
        assert one != run(spec, Forced(1))[0], "the adapter is served, and changes what is said"
    assert (one["bob", 2, 0] != two["bob", 2, 0]) == reaches
    assert one["ann", 1, 0] != two["ann", 1, 0], "whose own context it is"
