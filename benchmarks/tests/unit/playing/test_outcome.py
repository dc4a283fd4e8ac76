"""What journals add up to, against numbers worked out by hand."""

from __future__ import annotations

import math
from statistics import mean, median
from typing import Any

import pytest
from choreo_bench.evaluation import Difference, Score
from choreo_bench.evaluation.intervals import difference_interval, mean_interval, median_interval
from choreo_bench.experiments.bench_workflows.measure import CHAT
from choreo_bench.experiments.bench_workflows.report import COLUMNS, WorkflowReport
from choreo_bench.experiments.eval_untuned import TRIALS, UntunedReport
from choreo_bench.playing import PlayReport, paired, share_interval
from hypothesis import given
from hypothesis import strategies as st

Record = dict[str, Any]


def record(variant: str, item: str, score: float | None = None, **more: Any) -> Record:
    return {"variant": variant, "item": item, "score": score, "parts": {}} | more


def failed(variant: str, item: str, score: float | None = 0.0) -> Record:
    return {"variant": variant, "item": item, "error": "ContextLengthError: too long", "score": score}


def rows(variant: str, *scores: float | None) -> list[Record]:
    return [record(variant, str(number), score) for number, score in enumerate(scores)]


ITEMS = [str(number) for number in range(6)]


def test_shares_are_of_right_answers() -> None:
    report = PlayReport([*rows("choreo", 1, 1, 0, 1), *rows("baseline", 1, 0, 0, 0)], ["choreo", "baseline"], ITEMS[:4])
    choreo, baseline = report.outcomes()
    assert (choreo.name, choreo.items, choreo.share, choreo.unscored, choreo.failed) == ("choreo", 4, 0.75, 0, 0)
    assert choreo.interval == Score(3, 4).interval()
    assert choreo.difference == 0.5 and choreo.difference_interval == Difference(2, 0, 4).score_interval()
    assert (baseline.share, baseline.difference, baseline.difference_interval) == (0.25, None, None)


def test_differences_are_of_the_items_that_both_have() -> None:
    known = [*rows("choreo", 1, 1, 1, 1), *rows("baseline", 0, 1, None)]
    report = PlayReport(known, ["choreo", "baseline"], ITEMS)
    choreo, baseline = report.outcomes()
    assert choreo.share == 1 and choreo.difference == 0.5, "items 0 and 1"
    assert choreo.difference_interval == Difference(1, 0, 2).score_interval()
    assert (baseline.items, baseline.unscored, baseline.share) == (3, 1, 0.5)
    assert report.difference("baseline", "choreo") == (-0.5, Difference(0, 1, 2).score_interval())
    assert report.difference("choreo", "nobody") is None


def test_pairs_are_by_item_whatever_their_order() -> None:
    known = [*rows("choreo", 1, 0, 0), *reversed(rows("baseline", 1, 0, 0))]
    found = PlayReport(known, ["choreo", "baseline"], ITEMS).difference("choreo", "baseline")
    assert found == (0.0, Difference(0, 0, 3).score_interval())


def test_what_could_not_be_played_is_wrong() -> None:
    known = [record("choreo", "0", 1.0), failed("choreo", "1"), *rows("baseline", 0.0, 1.0)]
    choreo, baseline = PlayReport(known, ["choreo", "baseline"], ITEMS).outcomes()
    assert (choreo.items, choreo.failed, choreo.unscored, choreo.share, choreo.difference) == (2, 1, 0, 0.5, 0.0)
    assert baseline.failed == 0


def test_what_could_not_be_played_counts_for_nothing_if_nobody_knows_what_is_right() -> None:
    known = [record("choreo", "0", None), failed("choreo", "1", None)]
    [choreo] = PlayReport(known, ["choreo"], ITEMS).outcomes()
    assert (choreo.items, choreo.failed, choreo.unscored, choreo.share) == (2, 1, 2, None)


def test_only_the_items_that_are_asked_for_count() -> None:
    [found] = PlayReport(rows("choreo", 1, 0, 0), ["choreo"], ["0", "7"]).outcomes()
    assert (found.items, found.share, found.difference) == (1, 1.0, None)


def test_answers_that_nobody_knows_have_no_share() -> None:
    choreo, empty = PlayReport(rows("choreo", None, None), ["choreo", "baseline"], ITEMS).outcomes()
    assert (choreo.items, choreo.unscored, choreo.share, choreo.interval, choreo.difference) == (2, 2, None, None, None)
    assert (empty.items, empty.share) == (0, None)


def test_parts_are_means_over_those_that_have_them() -> None:
    known = [
        record("choreo", "0", 1.0, parts={"a": 1.0, "b": 0.5}),
        record("choreo", "1", 1.0, parts={"a": 0.0}),
        failed("choreo", "2"),
    ]
    [found] = PlayReport(known, ["choreo"], ITEMS).outcomes()
    assert found.parts == {"a": 0.5, "b": 0.5}


def test_shares_between_right_and_wrong_are_compared_by_resampling() -> None:
    known = [*rows("choreo", 0.5, 1.0, 0.75, 1.0), *rows("baseline", 0.25, 1.0, 0.0, 0.5)]
    choreo, baseline = PlayReport(known, ["choreo", "baseline"], ITEMS).outcomes()
    assert choreo.share == pytest.approx(0.8125) and choreo.difference == pytest.approx(0.375)
    assert choreo.interval == mean_interval([0.5, 1.0, 0.75, 1.0])
    assert choreo.difference_interval == difference_interval([0.5, 1.0, 0.75, 1.0], [0.25, 1.0, 0.0, 0.5])
    assert baseline.interval is not None and baseline.interval[0] < baseline.interval[1]


def test_one_item_tells_nothing_of_a_spread() -> None:
    assert share_interval([0.5]) is None and share_interval([]) is None and paired([0.5], [1.0]) == (-0.5, None)
    assert share_interval([1.0]) == Score(1, 1).interval()


values = st.lists(st.floats(0.125, 8, width=16), min_size=2, max_size=8)


@given(values)
def test_intervals_hold_the_figure_and_are_always_the_same(drawn: list[float]) -> None:
    other = [2 * value + 1 for value in reversed(drawn)]
    figures = {
        mean_interval: (mean(drawn), (drawn,)),
        difference_interval: (mean(drawn) - mean(other), (drawn, other)),
        median_interval: (median(drawn), (drawn,)),
    }
    for interval, (figure, samples) in figures.items():
        low, high = found = interval(*samples)  # type: ignore[operator]
        assert low - 1e-9 <= figure <= high + 1e-9 and not math.isnan(low + high)
        assert found == interval(*samples)  # type: ignore[operator]


def test_intervals_are_over_pairs() -> None:
    """A difference is taken item by item: where both samples vary alike, its interval has no width."""
    below = [1.0, 5.0, 20.0]
    assert difference_interval([each + 2 for each in below], below) == pytest.approx((2.0, 2.0))
    assert difference_interval([1.0], [2.0]) is None and median_interval([1.0]) is None


def test_a_single_call_is_compared_on_the_same_items() -> None:
    trial = next(trial for trial in TRIALS if trial.name == "ToT")
    items = dict.fromkeys(("ToT", trial.competitor), ITEMS[:3])
    records = {
        "ToT": [*rows("baseline", 1, 1, 0), *rows("choreo", 1, 1, 1)],
        trial.competitor: rows("baseline", 0, 1, 0, 1, 1),
    }
    single, baseline, choreo = UntunedReport(items, records).lines(4)
    assert (single.trial.name, single.gain, single.outcome.share) == (trial.competitor, None, pytest.approx(1 / 3))
    assert baseline.gain == (pytest.approx(1 / 3), Difference(1, 0, 3).score_interval())
    assert choreo.gain == (pytest.approx(2 / 3), Difference(2, 0, 3).score_interval())
    assert list(UntunedReport(items, records).lines(1)) == []


SETTINGS = {
    "model": "m",
    "dtype": "fp32",
    "device": "cpu",
    "threads": 1,
    "torch": "2",
    "transformers": "5",
    "langgraph": "1",
    "made_by": "commit 1",
}


def timed(
    method: str, problem: int, ttft: list[float], end: float, scenario: str = "MADpar", utterance: int = 4
) -> Record:
    found = {
        "scenario": scenario,
        "method": method,
        "problem": problem,
        "lengths": {"system": 1, "problem": 2, "utterance": utterance},
        "ttft_s": ttft,
        "end_to_end_s": end,
        "tokens_encoded": 1000 * (problem + 1),
        "tokens_reused": 50,
    }
    return found if method == CHAT else found | {"rows_per_decode_step": 2.0}


RUNS = [
    timed("naive", 0, [0.4], 8.0),
    timed("baseline", 0, [0.2, 0.4], 4.0),
    timed("choreo", 0, [0.1, 0.1], 2.0),
    timed("baseline", 1, [0.5], 6.0),
    timed("choreo", 1, [0.2, 0.2], 3.0),
    timed("choreo", 2, [9.0], 99.0),
    timed(CHAT, 0, [1.0], 20.0),
]


def test_ratios_are_medians_over_the_problems_that_both_ran() -> None:
    report, setting = WorkflowReport(SETTINGS, RUNS), ("MADpar", "1/2/4")
    assert report.methods(setting) == ["choreo", "baseline", "naive", CHAT]
    first, end = report.ratio(setting, "baseline", "ttft"), report.ratio(setting, "baseline", "end_to_end_s")
    assert first is not None and end is not None
    assert first.ratio == pytest.approx((3.0 + 2.5) / 2) and end.ratio == 2.0
    assert first.interval == pytest.approx((2.5, 3.0)) and end.words() == "2.00x (2.00 to 2.00)"
    once = report.ratio(setting, "naive", "end_to_end_s")
    assert once is not None and once.interval is None and once.words() == "4.00x"
    paused = [timed("baseline", 3, [0.1], 400.0), timed("choreo", 3, [0.1], 4.0), timed("baseline", 2, [1.0], 198.0)]
    assert (found := WorkflowReport(SETTINGS, [*RUNS, *paused]).ratio(setting, "baseline", "end_to_end_s")) is not None
    assert found.ratio == 2.0
    assert report.ratio(setting, "nobody", "ttft") is None and report.ratio(("x", "y"), "naive", "ttft") is None
    without = WorkflowReport(SETTINGS, [run for run in RUNS if run["method"] != "choreo"])
    assert without.ratio(setting, "baseline", "ttft") is None and len(list(without.rows())) == 3


def test_the_table_has_a_row_for_each_method() -> None:
    report = WorkflowReport(SETTINGS, RUNS)
    choreo, baseline, naive, chat = ([*row] for row in report.rows())
    assert len(choreo) == len(COLUMNS)
    assert choreo == ["MADpar, 1/2/4", "choreo", "3", "200", "3.00", "2,000", "50", "2.0", "", ""]
    assert baseline[1:8] == ["baseline", "2", "400", "5.00", "1,500", "50", "2.0"]
    assert baseline[8:] == ["2.75x (2.50 to 3.00)", "2.00x (2.00 to 2.00)"]
    assert naive[8:] == ["4.00x", "4.00x"] and chat[7:] == ["1.0", "10.00x", "10.00x"]
    page = report.report().as_markdown("choreo bench workflows")
    assert page.startswith("`choreo bench workflows`\n") and page.count("| MADpar, 1/2/4 |") == 4
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1


def test_the_object_has_all_ratios_and_runs() -> None:
    found = WorkflowReport(SETTINGS, RUNS).report().object
    assert found["runs"] == RUNS and found["settings"] == SETTINGS
    assert {(each["method"], each["figure"]) for each in found["ratios"]} == {
        (method, figure) for method in ("baseline", "naive", CHAT) for figure in ("ttft", "end_to_end_s")
    }


def test_lengths_are_settings_of_their_own() -> None:
    runs = [*RUNS, timed("choreo", 0, [1.0], 1.0, utterance=8), timed("baseline", 0, [1.0], 7.0, utterance=8)]
    found = WorkflowReport(SETTINGS, runs).ratio(("MADpar", "1/2/8"), "baseline", "end_to_end_s")
    assert found is not None and found.ratio == 7.0


def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[float, float]]]:
    """Lines of the left plot, by label."""
    from matplotlib.axes import Axes

    lines: dict[str, list[tuple[float, float]]] = {}
    plot = Axes.plot

    def watched(self: Any, x: Any, y: Any, **options: Any) -> Any:
        lines.setdefault(options["label"], list(zip(x, y, strict=True)))
        return plot(self, x, y, **options)

    monkeypatch.setattr(Axes, "plot", watched)
    return lines


def test_lengths_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(monkeypatch)
    runs = [
        timed(method, problem, [ttft * utterance], 1.0, scenario, utterance)
        for scenario in ("MADpar", "MADiter")
        for utterance in (16, 4)
        for problem in (0, 1)
        for method, ttft in (("choreo", 1.0), ("baseline", utterance))
    ]
    WorkflowReport(SETTINGS, runs).lengths_figure()
    assert lines == {name: [(4, 4.0), (16, 16.0)] for name in ("MADpar", "MADiter")}


def test_trees_are_drawn_by_who_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(monkeypatch)
    runs = [
        timed(method, 0, [ttft], 1.0, f"ToT {branches}x{voters}{behind}")
        for behind, factor in (("", 1), (" critics", 3))
        for branches in (4, 2)
        for voters in (4, 16)
        for method, ttft in (("choreo", 1.0), ("baseline", float(branches * voters * factor)))
    ]
    WorkflowReport(SETTINGS, [*RUNS, *runs]).sweep_figure()
    assert lines == {
        "4 voters": [(2, 8.0), (4, 16.0)],
        "16 voters": [(2, 32.0), (4, 64.0)],
        "4 critics": [(2, 24.0), (4, 48.0)],
        "16 critics": [(2, 96.0), (4, 192.0)],
    }
