"""What sharing an edge saves and changes, measured with the same words."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from choreo_bench.experiments import bench_edges as edges
from choreo_bench.experiments.bench_edges import EdgeInput, measure_edges, read_inputs, readable, shared_edges
from integration.engine.test_hostile_files import HOSTILE
from support.graphs import agent

from choreo_agents import START, ChoreoGraph, Sampling, VisibilityRule
from choreo_agents.errors import InvalidRequestError, VisibilityError
from choreo_agents.models import LoadedModel


def graph() -> ChoreoGraph:
    found = ChoreoGraph(system="Root.")
    for name in ("ann", "bob", "cleo"):
        found.add_node(agent(name, system=f"{name} has 3 red kites."))
    found.add_edge(START, "ann", visibility="reencoded").add_edge("ann", "bob").add_edge("bob", "cleo")
    found.set_visibility(START, "bob", "reencoded").set_visibility(START, "cleo", "reencoded").set_visibility(
        "ann", "cleo", "reencoded"
    )
    return found


INPUTS = [EdgeInput({"messages": [("user", f"What has {name}?")]}) for name in ("Ann", "Bob")]


def test_every_shared_edge_is_measured_by_itself(tiny: LoadedModel) -> None:
    assert shared_edges(graph()) == [("ann", "bob"), ("bob", "cleo")]
    steps: list[None] = []
    found = measure_edges(graph(), INPUTS, model=tiny, on_progress=lambda: steps.append(None))
    assert [(each.source, each.reader) for each in found] == shared_edges(graph()) and len(steps) == 2 * (1 + 2)
    for each in found:
        # The copy that re-encoding makes is the source's whole message.
        assert each.tokens_saved > 0 and 0 < each.share_saved < 1
        assert each.kl > 0 and each.kl_interval[0] <= each.kl <= each.kl_interval[1] and 0 <= each.agreement <= 1
        assert each.probe_shared is None and each.advice in ("share", "re-encode", "fine-tune")


def test_a_reencoded_edge_changes_its_readers_words_only_by_its_encoding(tiny: LoadedModel) -> None:
    """An edge over which nothing private comes, at the same place, changes nothing: the copy is the same KV."""
    plain = ChoreoGraph()
    plain.add_node(agent("ann")).add_node(agent("bob"))
    plain.add_edge(START, "ann").add_edge("ann", "bob")
    [of_input, of_input_too, between] = measure_edges(plain, INPUTS[:1], model=tiny)
    assert {(e.source, e.reader) for e in (of_input, of_input_too)} == {(START, "ann"), (START, "bob")}
    assert (between.source, between.reader) == ("ann", "bob")
    assert between.kl < 1e-9 and between.agreement == 1.0 and between.advice == "share"


def test_a_measurement_goes_on_where_it_ended(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs.jsonl"
    whole = measure_edges(graph(), INPUTS, model=tiny, out=out)
    lines = out.read_text().splitlines()
    assert len(lines) == 4
    out.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    runs: list[object] = []
    run = edges._run
    monkeypatch.setattr(edges, "_run", lambda *args: runs.append(args) or run(*args))
    again = measure_edges(graph(), INPUTS, model=tiny, out=out)
    assert len(runs) == 3, "the second input: freely, as it is, and with the one edge that was missing"
    assert [(e.kl, e.agreement, e.tokens_saved) for e in again] == [(e.kl, e.agreement, e.tokens_saved) for e in whole]
    assert len(out.read_text().splitlines()) == 4
    runs.clear()
    measure_edges(graph(), INPUTS[:1], model=tiny, out=out)
    measure_edges(graph(), INPUTS, model=tiny, out=out)
    assert not runs and len(out.read_text().splitlines()) == 4
    with pytest.raises(InvalidRequestError, match="is of another graph, model or input: it measures 'ann' to 'bob'"):
        measure_edges(graph().with_rule("ann", "bob", "reencoded"), INPUTS, model=tiny, out=out)
    with pytest.raises(InvalidRequestError, match="is of another graph, model or input"):
        measure_edges(graph(), list(reversed(INPUTS)), model=tiny, out=out)
    out.write_text("3\n" + out.read_text())
    with pytest.raises(InvalidRequestError, match=r"runs\.jsonl:1 is not a measurement"):
        measure_edges(graph(), INPUTS, model=tiny, out=out)


def test_a_probe_reads_a_private_label_through_a_shared_edge_only(tiny: LoadedModel) -> None:
    """All say the same words; only what ann's encoding attended to differs."""
    leaky = ChoreoGraph()
    same = Sampling(forced_token_ids=(40, 41, 42))
    leaky.add_node(agent("ann", system="?", sampling=same)).add_node(agent("bob", sampling=same))
    leaky.add_edge(START, "ann", visibility={}).add_edge("ann", "bob").set_visibility(START, "bob", "reencoded")
    leaky.set_visibility(START, "ann", "private")
    rng = Random(0)
    inputs = []
    for _ in range(20):
        label = rng.choice(["kites", "cups"])
        inputs.append(EdgeInput({"messages": []}, {"ann": f"Ann has {rng.randrange(2, 9)} red {label}. " * 3}, label))
    [found] = measure_edges(leaky, inputs, model=tiny)
    assert found.probe_shared is not None and found.probe_reencoded is not None
    # The words are the same for all: re-encoded, they tell nothing beyond which label is the more frequent.
    assert found.probe_reencoded <= 0.7 < 0.85 <= found.probe_shared and found.advice == "re-encode"


def test_a_probe_reads_what_is_linear_and_nothing_else() -> None:
    rng = Random(1)
    labels = [rng.choice("ab") for _ in range(60)]
    told = [[(label == "a") + rng.gauss(0, 0.2), *(rng.gauss(0, 1) for _ in range(5))] for label in labels]
    noise = [[rng.gauss(0, 1) for _ in range(6)] for _ in labels]
    assert readable(told, labels) > 0.9 and readable(noise, labels) < 0.7
    assert readable(told, labels) == readable(told, labels)


@pytest.mark.parametrize(
    ("figures", "advice"),
    [
        ((0.001, 1.0, 0.5, None, None), "share"),
        ((0.001, 1.0, 0.5, 0.9, 0.5), "re-encode"),
        ((0.001, 1.0, 0.5, 0.55, 0.5), "share"),
        ((0.5, 0.8, 0.5, None, None), "fine-tune"),
        ((0.5, 0.8, 0.01, None, None), "re-encode"),
        ((0.001, 0.9, 0.5, None, None), "fine-tune"),
    ],
)
def test_advice_follows_the_figures(figures: tuple, advice: str) -> None:
    assert edges._advice(*figures) == advice


def test_there_must_be_something_to_measure(tiny: LoadedModel) -> None:
    with pytest.raises(InvalidRequestError, match="at least one input"):
        measure_edges(graph(), [], model=tiny)
    alone = graph().with_rule("ann", "bob", "reencoded").with_rule("bob", "cleo", VisibilityRule("reencoded"))
    with pytest.raises(InvalidRequestError, match="no edge between two agents of the graph is shared"):
        measure_edges(alone, INPUTS, model=tiny)
    with pytest.raises(InvalidRequestError, match="the graph has no model"):
        measure_edges(graph(), INPUTS)
    with pytest.raises(VisibilityError, match="the graph has no agent or persona named 'dan'"):
        measure_edges(graph(), [EdgeInput({"messages": []}, {"dan": "?"})], model=tiny)


def test_inputs_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "inputs.jsonl"
    lines = [
        {"messages": "What?"},
        {"messages": [["user", "Who?"]], "systems": {"ann": "S."}, "label": 3, "topic": "kites"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    one, two = read_inputs(path)
    assert one == EdgeInput({"messages": [("user", "What?")]})
    assert two == EdgeInput({"messages": [["user", "Who?"]], "topic": "kites"}, {"ann": "S."}, "3")
    path.write_text('{"messages": "What?"}\n[1]\n')
    with pytest.raises(InvalidRequestError, match=r"inputs\.jsonl:2 is not a valid input"):
        read_inputs(path)


@pytest.mark.parametrize("content", HOSTILE)
def test_lines_that_are_no_inputs_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "inputs.jsonl"
    path.write_bytes(HOSTILE[content] + b"\n")
    if content in ("nothing", "another kind"):
        assert len(read_inputs(path)) == (content == "another kind"), "a graph's state may hold anything"
    else:
        with pytest.raises(InvalidRequestError, match="is not a valid input"):
            read_inputs(path)
