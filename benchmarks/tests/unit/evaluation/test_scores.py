"""Shares and their intervals."""

import math
import random

import pytest
from choreo_bench.evaluation import Difference, Score


@pytest.mark.parametrize(
    ("right", "count", "low", "high"), [(98, 100, 0.930, 0.994), (0, 10, 0.0, 0.278), (500, 500, 0.992, 1.0)]
)
def test_wilsons_interval(right: int, count: int, low: float, high: float) -> None:
    score = Score(right, count)
    assert score.share == right / count
    assert score.interval() == pytest.approx((low, high), abs=1e-3)


def test_a_paired_difference_counts_problems_that_only_one_way_gets_right() -> None:
    difference = Difference.of([True] * 90 + [False] * 10, [True] * 50 + [False] * 45 + [True] * 5)
    assert (difference.gained, difference.lost, difference.count) == (40, 5, 100)
    assert difference.share == pytest.approx(0.35)
    low, high = difference.interval()
    assert (low, high) == pytest.approx((0.2311, 0.4552), abs=1e-3)


def test_a_difference_of_nothing_includes_nothing() -> None:
    low, high = Difference.of([True, False], [False, True]).interval()
    assert low < 0 < high


def test_ways_that_saw_different_numbers_of_problems_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        Difference.of([True], [True, False])


def test_intervals_stay_within_what_is_possible() -> None:
    for count in range(1, 2000):
        low, high = Score(0, count).interval()
        assert f"{low:.2f}" == "0.00" and high <= 1.0
        assert Score(count, count).interval()[1] <= 1.0
    assert Difference(100, 0, 100).interval()[1] == 1.0 and Difference(0, 100, 100).interval()[0] == -1.0


@pytest.mark.parametrize(("gained", "lost", "count"), [(0, 0, 10), (5, 0, 10), (10, 10, 100), (30, 10, 100), (1, 0, 3)])
def test_the_score_interval_inverts_mcnemars_test(gained: int, lost: int, count: int) -> None:
    low, high = Difference(gained, lost, count).score_interval()
    assert -1 <= low <= (gained - lost) / count <= high <= 1 and low < high
    back = Difference(lost, gained, count).score_interval()
    assert back == pytest.approx((-high, -low), abs=1e-6)
    # Significant by McNemar's statistic just when none is not among the differences.
    significant = gained + lost > 0 and abs(gained - lost) / math.sqrt(gained + lost) > 1.96
    assert significant == (not low <= 0 <= high)


@pytest.mark.parametrize(("first", "second", "count"), [(0.3, 0.0, 100), (0.3, 0.05, 60), (0.1, 0.1, 50)])
def test_the_score_interval_covers_the_truth_about_as_often_as_it_says(first: float, second: float, count: int) -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(400):
        draws = [rng.random() for _ in range(count)]
        gained, lost = sum(d < first for d in draws), sum(first <= d < first + second for d in draws)
        low, high = Difference(gained, lost, count).score_interval()
        covered += low <= first - second <= high
    assert 0.9 <= covered / 400 <= 0.99
