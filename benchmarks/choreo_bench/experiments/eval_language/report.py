"""A language report as tables: on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from choreo_bench.evaluation import Score, VoteResult
from choreo_bench.experiments.eval_language.measure import BARS, SAMPLES, TEMPERATURE, LanguageReport, View

HEADINGS: dict[View, str] = {
    "ordinary": "ordinary prompts",
    "serial": "caches, in sequence",
    "parallel": "caches, one offset",
}


def as_tables(report: LanguageReport) -> list[Table]:
    """Accuracy by task and view, then samples against votes."""
    tables = [_table(f"{report.model}: {report.count} problems a task, {report.split} split", *_accuracy(report))]
    if report.vote is not None:
        tables.append(_table(f"arithmetic at temperature {TEMPERATURE}", *_votes(report.vote)))
    return tables


def as_markdown(report: LanguageReport, command: str) -> str:
    """The same tables in Markdown, with what it takes to measure them again."""
    head = [
        "# How well the embedded model speaks its language"
        if report.model == "embedded"
        else f"# How well {report.model} speaks the language",
        "",
        f"Measured by `{command}`.",
        f"Weights: `{report.fingerprint}`. Seeds {report.seed} to {report.seed + report.count - 1} of the "
        f"{report.split} split, {report.count} problems a task, temperature 0; in brackets Wilson's 95 % interval.",
        "",
        *_markdown(*_accuracy(report)),
    ]
    if report.vote is not None:
        head += [
            "",
            f"Arithmetic at temperature {TEMPERATURE}, ordinary prompts:",
            "",
            *_markdown(*_votes(report.vote)),
        ]
    return "\n".join(head) + "\n"


Rows = tuple[list[str], list[list[str]]]


def _accuracy(report: LanguageReport) -> Rows:
    views = list(report.results)
    bars = "ordinary" in views and report.model == "embedded"
    heading = ["task", *(HEADINGS[view] for view in views), *(["bar"] if bars else [])]
    rows: list[list[str]] = []
    for task in report.results[views[0]]:
        row = [task.replace("_", " "), *(_words(report.results[view][task].solved) for view in views)]
        bar = BARS.get(task)
        if bars:
            met = bar is not None and report.results["ordinary"][task].solved.share >= bar
            row.append("" if bar is None else f"{bar:.2f} {'met' if met else 'missed'}")
        rows.append(row)
        parsable = {view: report.results[view][task].parsable for view in views}
        if any(score is not None for score in parsable.values()):
            cells = [_words(score) if score is not None else "" for score in parsable.values()]
            rows.append([f"{task.replace('_', ' ')}, readable", *cells, *([""] if bars else [])])
    return heading, rows


def _votes(vote: VoteResult) -> Rows:
    low, high = vote.gain.interval()
    return ["", "right"], [
        ["one sample", _words(vote.single)],
        [f"vote over {SAMPLES} samples", _words(vote.vote)],
        ["gain", f"{vote.gain.share:+.3f} ({low:+.2f} to {high:+.2f})"],
    ]


def _words(score: Score) -> str:
    low, high = score.interval()
    return f"{score.share:.3f} ({low:.2f}-{high:.2f})"


def _table(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for index, name in enumerate(heading):
        table.add_column(name, no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    return table


def _markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heading, ["---"] * len(heading), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
