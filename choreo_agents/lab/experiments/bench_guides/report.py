"""What was measured, as tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from choreo_agents.lab.experiments.bench_guides.measure import GuidesReport

COLUMNS = ("masks over", "median, µs", "95 %, µs", "of its step")
_VALID, _OF = 190, 200
"""So many of so many answers are to validate, at least."""


def title(report: GuidesReport) -> str:
    """What the table is of."""
    told = ", ".join(f"{name} {number}" for name, number in report.versions().items())
    return (
        f"{report.schemas} random JSON schemas, {report.model}, temperature 1, at most {report.max_tokens} tokens, "
        f"{report.rows} rows a step, {report.threads} thread(s); {told}"
    )


def table(report: GuidesReport) -> list[tuple[str, ...]]:
    """What a mask costs, for a token and row: beside the row's share of a step that nothing leads."""
    share = report.free_step_s / report.rows
    made: list[tuple[str, ...]] = []
    for times in report.masks:
        middle, high = times.at(0.5), times.at(0.95)
        cells = f"{1e6 * middle:,.1f}", f"{1e6 * high:,.1f}", f"{middle / share:.1%}"
        made.append((f"{times.vocabulary:,} words", *cells))
    return made


def lines(report: GuidesReport) -> list[str]:
    """The counts, and whether they are what they should be."""
    counts = report.counts
    enough = counts.valid * _OF >= _VALID * report.schemas and not counts.invalid and not counts.bounded_cut
    return [
        f"{'met' if enough else 'missed'}: {counts.valid} of {report.schemas} answers validate, {counts.cut} are the "
        f"error of one cut at {report.max_tokens} tokens, {counts.invalid} are neither",
        f"of {counts.bounded} schemas whose longest output fits, {counts.bounded_cut} were cut",
        f"a step of {report.rows} rows: {1e3 * report.free_step_s:.2f} ms led by nothing, "
        f"{1e3 * report.guided_step_s:.2f} ms led by schemas",
    ]


def as_object(report: GuidesReport) -> dict[str, Any]:
    """In JSON's types."""
    masks = [{"vocabulary": m.vocabulary, "median_s": m.at(0.5), "high_s": m.at(0.95)} for m in report.masks]
    return {**asdict(report), **report.versions(), "masks": masks}


def as_markdown(report: GuidesReport, command: str) -> str:
    """The table, with what it takes to measure it again."""
    rows = [f"| {' | '.join(row)} |" for row in table(report)]
    head = [f"| {' | '.join(COLUMNS)} |", f"|---|{'--:|' * (len(COLUMNS) - 1)}"]
    told = [f"- {line}" for line in lines(report)]
    return "\n".join([f"`{command}`", "", f"{title(report)}.", "", *head, *rows, "", *told, ""])
