"""What choosing tokens costs is told in softmaxes, and held against bars."""

from __future__ import annotations

from dataclasses import replace

import pytest

from choreo_agents.lab.experiments.bench_sampling.measure import CASES, drawn_logits, measure_sampling, nucleus
from choreo_agents.lab.experiments.bench_sampling.report import BARS_AT, CaseTimes, SamplingReport, median_interval


def report() -> SamplingReport:
    cases = [
        CaseTimes("cheap", "flat", 0.4, [(1.0, 0.5), (2.0, 0.8), (1.0, 0.3)], [(1.0, 30.0)], checked=4, allowed=4),
        CaseTimes("dear", "peaked", 1.0, [(0.5, 1.0)], checked=2, allowed=1),
        CaseTimes("free", "peaked", None, [(1.0, 9.0)]),
    ]
    rows, words, threads = BARS_AT
    return SamplingReport(rows, words, threads, 3, {"flat": 9}, cases, [(1.0, 0.25)])


def test_bars_are_medians_of_paired_ratios() -> None:
    assert [(bar.what, bar.found, bar.met) for bar in report().bars()] == [
        ("cheap, flat", 0.4, True),
        ("dear, peaked", 2.0, False),
    ]


def test_bars_are_for_the_sizes_they_are_meant_for() -> None:
    assert replace(report(), rows=2).bars() == [] and replace(report(), words=262_144).bars() == []
    assert replace(report(), threads=2).bars() == []


def test_every_bar_is_said_to_be_met_or_missed_and_so_are_tokens_that_filters_leave() -> None:
    assert report().lines() == [
        "met: cheap, flat, at most 0.4 softmaxes: 0.40",
        "missed: dear, peaked, at most 1 softmaxes: 2.00",
        "missed: tokens that transformers' filters leave: 5 of 6",
    ]


def test_a_table_has_the_softmax_first() -> None:
    softmax, again, cheap, _, free = report().table()
    assert softmax == ("softmax", "", "1,000.0", "1.00", "", "", "", "")
    assert again[2:5] == ("250.0", "0.25", "0.25 to 0.25")
    assert cheap == ("cheap", "flat", "500.0", "0.40", "0.30 to 0.50", "30.00", "30.00 to 30.00", "4 of 4")
    assert free[-3:] == ("", "", "")
    written = report().as_markdown("choreo bench sampling")
    assert written.startswith("`choreo bench sampling`\n") and "| dear | peaked |" in written and "- missed:" in written


@pytest.mark.parametrize(("count", "low", "high"), [(1, 0, 0), (5, 0, 4), (6, 0, 5), (15, 3, 11), (41, 13, 27)])
def test_the_interval_of_a_median_is_the_one_of_tables(count: int, low: int, high: int) -> None:
    """The fourth least and greatest of 15, the fourteenth of 41."""
    assert median_interval(range(count)) == (low, high)


def test_peaked_logits_have_a_nucleus_of_less_than_a_thousand_words() -> None:
    _, words, _ = BARS_AT
    assert 500 < nucleus(drawn_logits("peaked", 1, words), 0.9) <= 1_000 < nucleus(drawn_logits("flat", 1, words), 0.9)


def test_every_case_is_measured_and_every_token_is_one_that_transformers_leaves() -> None:
    found = measure_sampling(3, 1_500, repeats=2)
    assert [case.name for case in found.cases] == [case.name for case in CASES]
    for case, times in zip(CASES, found.cases, strict=True):
        assert len(times.ours) == 2 and len(times.theirs) == 2 * case.rival
        assert times.allowed == times.checked == 9 * case.rival
