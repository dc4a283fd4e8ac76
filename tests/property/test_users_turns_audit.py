"""What the audit says, against what happens, where others speak in users' turns that the view puts together."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.interference import WARN, changed, contexts_of, models, run, unreached
from support.templates import tokenizer_for
from support.tiny import save_tiny_llama
from support.visible_graphs import MODES, OWN, Forced, Spec, specs

from choreo_agents.models import load_model
from choreo_agents.runtime.step_trace import StepTrace

# Declared-private pairs are broken on purpose here: the audit is asked, not obeyed.
pytestmark = pytest.mark.filterwarnings("ignore::choreo_agents.errors.VisibilityWarning")
FAMILIES = ("Gemma 3", "Mistral Small 3")


@pytest.fixture(autouse=True, scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> None:
    for family in FAMILIES:
        folder, tokenizer = tmp_path_factory.mktemp("family"), tokenizer_for(family)
        options = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "max_position_embeddings": 4096}
        models[family] = load_model(save_tiny_llama(folder, tokenizer=tokenizer, **options))


@given(specs() | specs(modes=(*MODES, *OWN, *OWN)), st.integers(0, 99), st.sampled_from(FAMILIES))
@settings(max_examples=20)
def test_static_audits_cover_runs_with_users_turns(spec: Spec, seed: int, family: str) -> None:
    """What stands around parts of users' turns is nobody's, and hides nobody's words."""
    static = spec.graph(WARN).audit()
    _, _, dynamic = run(spec, Forced(seed), model=family)
    known = {(finding.context, finding.reader, finding.channel) for finding in static.findings}
    found = {(finding.context, finding.reader, finding.channel) for finding in dynamic.findings}
    assert found <= known, f"not foreseen: {found - known}"


@given(specs(), st.integers(0, 99), st.sampled_from(FAMILIES), st.data())
@settings(max_examples=12, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_encodings_in_users_turns_do_not_interfere(spec: Spec, seed: int, family: str, data: st.DataObject) -> None:
    """What cannot reach a reader as an encoding changes no bit of its distributions."""
    report = spec.graph(WARN).audit()
    context = data.draw(st.sampled_from(contexts_of(spec, report)))
    readers = unreached(spec, report, context, "encoding")
    assume(readers)
    other, authors = changed(spec, context)
    step_trace = StepTrace()
    one, _, _ = run(spec, Forced(seed), step_trace, echoing=False, model=family)
    two, _, _ = run(other, Forced(seed, authors), step_trace.replay(), echoing=False, model=family)
    for key in one:
        if key[0] in readers:
            assert one[key] == two[key], f"{context} reached {key}"
