"""The paper's tables of what was played: on the terminal, and in Markdown."""

from __future__ import annotations

from rich import box
from rich.table import Table

from choreo_bench.evaluation.intervals import Interval
from choreo_bench.experiments.eval_untuned.measure import TITLES, Line, UntunedReport

TABLES = (1, 2, 4)


def _columns(lines: list[Line]) -> list[str]:
    gains = any(line.gain is not None for line in lines)
    # Where there is a single call to compare with, further shares are not about answers.
    parts = [] if gains else list(dict.fromkeys(part for line in lines for part in line.outcome.parts))
    return ["workflow", "method", "%", "to the baseline", *(["to a single call"] if gains else []), *parts]


def _cells(line: Line, columns: list[str]) -> list[str]:
    outcome = line.outcome
    assert outcome.share is not None
    cells = {
        "workflow": line.trial.name,
        "method": outcome.name,
        "%": f"{100 * outcome.share:.1f}{_interval(outcome.interval, '.1f')}",
        "to the baseline": _signed(outcome.difference, outcome.difference_interval),
        "to a single call": _signed(*line.gain) if line.gain is not None else "",
        **{part: f"{100 * share:.1f}" for part, share in outcome.parts.items()},
    }
    return [cells.get(column, "") for column in columns]


def _signed(difference: float | None, interval: Interval | None) -> str:
    return "" if difference is None else f"{100 * difference:+.1f}{_interval(interval, '+.1f')}"


def _interval(interval: Interval | None, style: str) -> str:
    return "" if interval is None else f" ({100 * interval[0]:{style}} to {100 * interval[1]:{style}})"


def untuned_table(report: UntunedReport, number: int) -> Table:
    """One of the paper's tables for the terminal."""
    lines = list(report.lines(number))
    table = Table(box=box.SIMPLE_HEAD, title=TITLES[number], title_justify="left")
    columns = _columns(lines)
    for column in columns:
        table.add_column(column, justify="left" if column in ("workflow", "method") else "right")
    for line in lines:
        table.add_row(*_cells(line, columns))
    return table


def as_markdown(report: UntunedReport, command: str, weights: str) -> str:
    """All tables, with the command that makes them again."""
    text = [f"`{command}`", "", f"Weights: `{weights[:16]}`. In brackets 95 % intervals.", ""]
    for number in TABLES:
        text += [f"## {TITLES[number]}", "", *table_lines(report, number), ""]
    return "\n".join(text)


def table_lines(report: UntunedReport, number: int) -> list[str]:
    """One of the paper's tables in Markdown."""
    lines = list(report.lines(number))
    columns = _columns(lines)
    head = [f"| {' | '.join(columns)} |", "|---|---" + "|--:" * (len(columns) - 2) + "|"]
    return [*head, *(f"| {' | '.join(_cells(line, columns))} |" for line in lines)]
