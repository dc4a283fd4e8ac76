"""How often Bob cooperates, as a table: on the terminal, and in Markdown."""

from __future__ import annotations

from rich import box
from rich.table import Table

from choreo_bench.experiments.eval_dilemma.measure import VARIANTS, DilemmaReport

ALICE_IS_TOLD = {"free": "no explicit strategy", "cooperate": "always cooperate", "defect": "always defect"}
"""Strategies in the paper's words."""


def _cells(report: DilemmaReport, alice: str) -> list[str]:
    cells = [ALICE_IS_TOLD[alice], f"{100 * report.score(alice, 'baseline').share:.1f}"]
    for variant in VARIANTS[1:]:
        low, high = report.difference(alice, variant).score_interval()
        cells.append(f"{100 * report.score(alice, variant).share:.1f} ({100 * low:+.1f} to {100 * high:+.1f})")
    return cells


def as_table(report: DilemmaReport) -> Table:
    """For the terminal."""
    table = Table(
        box=box.SIMPLE_HEAD, title=f"how often Bob cooperates, % of {report.games} games", title_justify="left"
    )
    for column in ("Alice's strategy", *VARIANTS):
        table.add_column(column)
    for alice in report.cooperated:
        table.add_row(*_cells(report, alice))
    return table


def unread_words(report: DilemmaReport) -> str:
    """How many decisions say neither, variant by variant."""
    found = ", ".join(f"{variant} {count}" for variant, count in report.unread.items() if count)
    return f"decisions of Bob's that cannot be read, counted as no cooperation: {found or 'none'}"


def as_markdown(report: DilemmaReport, command: str) -> str:
    """The table, with the command that makes it again."""
    lines = [f"`{command}`", "", f"How often Bob cooperates, in % of {report.games} games.", ""]
    lines += [f"| Alice's strategy | {' | '.join(VARIANTS)} |", "|---|--:" + "|--:" * (len(VARIANTS) - 1) + "|"]
    lines += [f"| {' | '.join(_cells(report, alice))} |" for alice in report.cooperated]
    return "\n".join(
        [
            *lines,
            "",
            "In brackets: 95 % interval of the difference to the baseline, which inverts McNemar's test. "
            f"{unread_words(report)}.",
            "",
        ]
    )
