"""Scores of a workflow as tables."""

from __future__ import annotations

import shlex

from rich import box
from rich.table import Table

from choreo_agents.workflows.case import Case
from choreo_agents.workflows.playing import Setup
from choreo_bench.evaluation.intervals import Interval
from choreo_bench.language import Split
from choreo_bench.playing.outcome import PlayReport, VariantOutcome


def as_table(case: Case, report: PlayReport) -> Table:
    """For the terminal."""
    outcomes = report.outcomes()
    title = f"{case.name.replace('_', ' ')}: {case.scored}, %; in brackets 95 % intervals"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    columns, rows = _cells(case, outcomes)
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def as_markdown(case: Case, report: PlayReport, setup: Setup, model: str, split: Split | None, seed: int) -> str:
    """The table, with the command that makes it again."""
    outcomes = report.outcomes()
    columns, rows = _cells(case, outcomes)
    words = [f"choreo eval {case.name}", *_changed(setup)]
    words += [f"--model {shlex.quote(model)}"] if model != "embedded" else []
    words += [f"--prompts {shlex.quote(setup.prompts.source)}"] if setup.prompts.is_own else []
    words += ["--inputs ..."] if split is None else [f"--n {outcomes[0].items}", f"--split {split}", f"--seed {seed}"]
    words += [f"--method {shlex.quote(','.join(outcome.name for outcome in outcomes))}"]
    words += [f"--temperature {setup.sampling.temperature:g}", f"--top-p {setup.sampling.top_p:g}"]
    words += [f"--max-tokens {setup.sampling.max_tokens}"]
    lines = [f"`{' '.join(words)}`", "", f"| {' | '.join(columns)} |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _changed(setup: Setup) -> list[str]:
    """Options that are not the workflow's defaults."""
    defaults = setup.case.options()
    return [
        f"--{name.replace('_', '-')} {value}"
        for name, value in setup.options.model_dump().items()
        if value != getattr(defaults, name)
    ]


def _cells(case: Case, outcomes: list[VariantOutcome]) -> tuple[list[str], list[list[str]]]:
    parts = list(dict.fromkeys(part for outcome in outcomes for part in outcome.parts))
    against = any(outcome.difference is not None for outcome in outcomes)
    columns = ["method", "items", case.scored, *(["to the baseline"] if against else []), *parts]
    rows: list[list[str]] = []
    for each in outcomes:
        share = "unknown" if each.share is None else f"{100 * each.share:.1f}{_interval(each.interval, signed=False)}"
        row = [each.name, str(each.items), share]
        if against:
            difference = each.difference
            row.append("" if difference is None else f"{100 * difference:+.1f}{_interval(each.difference_interval)}")
        rows.append(row + [f"{100 * each.parts[part]:.1f}" if part in each.parts else "" for part in parts])
    return columns, rows


def _interval(interval: Interval | None, *, signed: bool = True) -> str:
    if interval is None:
        return ""
    style = "+.1f" if signed else ".1f"
    return f" ({100 * interval[0]:{style}} to {100 * interval[1]:{style}})"
