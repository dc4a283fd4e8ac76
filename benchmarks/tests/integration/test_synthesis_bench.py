"""`choreo bench synthesis`: what each way encodes and maps, counted; times are for elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support.commands import choreo
from choreo_bench.experiments.bench_synthesis.measure import (
    MERGES,
    PLAIN,
    TEXT,
    WAYS,
    BranchWords,
    Sizes,
    SynthesisBench,
    key_of,
)
from choreo_bench.experiments.bench_synthesis.report import SynthesisReport

from choreo_agents.models import LoadedModel
from choreo_agents.training.journal import Journal

SIZES = Sizes(branches=3, length=20, trunk=16, context=5, question=7, header=2)


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("choreo_bench.timing.REST_S", 0.0)


@pytest.fixture
def bench(tiny: LoadedModel, tiny_path: Path) -> SynthesisBench:
    return SynthesisBench(tiny, tiny_path, torch.float32, repeats=2)


def run(*arguments: str) -> str:
    output: str = choreo("bench", "synthesis", *arguments).stdout
    return output


def test_what_each_way_encodes_and_maps(bench: SynthesisBench) -> None:
    journal, told = Journal(None, {}), list[str]()
    bench.measure(SIZES, journal, on_progress=told.append)
    assert sorted(told) == sorted(key_of(SIZES, way) for way in WAYS)
    counts = {r["way"]: (r["tokens_encoded"], r["tokens_mapped"]) for r in journal.records.values()}
    # The question and the header, and the one token that is said, for whoever reads it later.
    own = SIZES.question + SIZES.header + 1
    for way in MERGES:
        assert counts[way] == (own, 3 * 20 if way.endswith("now") else 0)
    # Of text all but the trunk; what is said last is not encoded.
    assert counts[TEXT] == (3 * 20 + 7 + 2, 0)
    assert counts[PLAIN] == (16 + 3 * 20 + 7 + 2, 0) == (SIZES.prompt, 0)
    assert all(len(r["first_token_s"]) == 2 and min(r["first_token_s"]) > 0 for r in journal.records.values())


def test_only_what_is_not_known_is_timed(
    bench: SynthesisBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.jsonl"
    with Journal(path, {}) as journal:
        bench.measure(SIZES, journal, [WAYS[1], TEXT])
        assert set(journal.records) == {key_of(SIZES, WAYS[1]), key_of(SIZES, TEXT)}
    known = path.read_bytes()
    engines: list[Any] = []
    measured = SynthesisBench._engine
    monkeypatch.setattr(SynthesisBench, "_engine", lambda *args: engines.append(args[-1]) or measured(*args))
    with Journal(path, {}) as journal:
        bench.measure(SIZES, journal)
        assert len(journal.records) == len(WAYS) and engines == ["choreo"]
        bench.measure(SIZES, journal)
    assert engines == ["choreo"] and path.read_bytes().startswith(known)


def test_dear_ways_are_timed_once(bench: SynthesisBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("choreo_bench.experiments.bench_synthesis.measure.DEAR_TOKENS", 10)
    journal = Journal(None, {})
    bench.measure(SIZES, journal, [WAYS[0], TEXT, PLAIN])
    assert [len(record["first_token_s"]) for record in journal.records.values()] == [2, 1, 1]


def test_words_are_others_for_each_run_and_the_same_for_each_bench() -> None:
    words = BranchWords(SIZES, 300)
    assert words.branches(1) == BranchWords(SIZES, 300).branches(1) != words.branches(2)
    assert [len(branch) for branch in words.branches(1)] == [20, 20, 20]


def test_ratios_are_of_medians() -> None:
    def record(way: str, *seconds: float) -> dict[str, Any]:
        return {"branches": 4, "length": 8, "way": way, "first_token_s": seconds, "tokens_encoded": 1} | {
            "tokens_mapped": 0
        }

    settings = {"model": "m", "dtype": "fp32", "device": "cpu", "threads": 1, "made_by": "torch"}
    report = SynthesisReport(settings, [record(PLAIN, 8.0), record(TEXT, 2.0, 4.0, 9.0), record("parallel", 1.0)])
    assert [row[1] for row in report.rows()] == ["parallel", TEXT, PLAIN]
    assert [row[-2:] for row in report.rows()] == [("4.0x", "8.0x"), ("", "2.0x"), ("0.5x", "")]
    assert report.ratio((4, 8), TEXT, "sequential") is None
    assert [(row["against"], row["ratio"]) for row in report.report().object["ratios"]] == [(TEXT, 4.0), (PLAIN, 8.0)]


def test_the_command_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, page, plot = tmp_path / "runs.jsonl", tmp_path / "page.md", tmp_path / "plot.png"
    command = ["--model", "embedded", "--dtype", "fp32", "--branches", "2", "--quick", "--out", str(out)]
    shown = run(*command, "--report", str(page), "--plot", str(plot))
    assert "2 x 32" in shown and "parallel, mapped now" in shown and plot.read_bytes().startswith(b"\x89PNG")
    assert page.read_text().startswith("`choreo bench synthesis --model embedded --dtype fp32 --branches 2 --quick ")
    assert page.read_text().count("| 2 x 64 |") == len(WAYS)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("timed again")

    monkeypatch.setattr("choreo_bench.experiments.bench_synthesis.measure._first_token", never)
    found = json.loads(run(*command, "--json"))
    assert len(found["runs"]) == 2 * len(WAYS) == 16 and len(found["ratios"]) == 2 * 2 * len(MERGES)


def test_a_quick_run_measures_the_lengths_that_are_given() -> None:
    command = ["--model", "embedded", "--dtype", "fp32", "--branches", "2", "--quick", "--lengths", "8"]
    found = json.loads(run(*command, "--json"))
    assert {(each["length"], len(each["first_token_s"])) for each in found["runs"]} == {(8, 1)}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lengths", "64,none"], "lengths must be numbers of 1 or more"),
        (["--lengths", "99999"], "use shorter --lengths"),
        (["--plot", "/proc/nowhere/plot.png", "--quick"], "No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str) -> None:
    monkeypatch.setattr(SynthesisBench, "measure", None)
    assert reason in choreo("bench", "synthesis", "--model", "embedded", *arguments, code=1).output
