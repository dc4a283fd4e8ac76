"""All tables, before and after distillation, and what was trained for them."""

from __future__ import annotations

from dataclasses import asdict

from choreo_bench.experiments.eval_dilemma.measure import ALICES, TUNED, DilemmaReport
from choreo_bench.experiments.eval_dilemma.report import ALICE_IS_TOLD
from choreo_bench.experiments.eval_tuned.measure import TunedReport
from choreo_bench.experiments.eval_untuned.measure import TITLES
from choreo_bench.experiments.eval_untuned.report import TABLES, table_lines


def as_object(found: TunedReport) -> dict[str, object]:
    """As plain JSON."""
    tables = {table: [asdict(line) for line in found.played.lines(table)] for table in TABLES}
    return {"tables": tables, "dilemma": found.dilemma and asdict(found.dilemma), "cards": found.cards}


def as_markdown(found: TunedReport, command: str, weights: str) -> str:
    """All tables, with the command that makes them again."""
    text = [f"`{command}`", "", f"Weights: `{weights[:16]}`. In brackets 95 % intervals.", ""]
    for table in TABLES:
        if table == 4 and found.dilemma is not None:
            text += ["## Table 3: how often Bob cooperates", "", *dilemma_lines(found.dilemma), ""]
        if any(found.played.lines(table)):
            text += [f"## {TITLES[table]}", "", *table_lines(found.played, table), ""]
    text += ["## What was trained", "", *_course_lines(found)]
    return "\n".join([*text, ""])


def dilemma_lines(report: DilemmaReport) -> list[str]:
    """Table 3 in Markdown."""
    lines = ["| Alice is told | baseline | choreo | to the baseline | choreo + tuned | to the baseline |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for alice in ALICES:
        cells = [f"{100 * report.score(alice, 'baseline').share:.1f}"]
        for variant in ("choreo", TUNED):
            difference = report.difference(alice, variant)
            low, high = difference.score_interval()
            cells.append(f"{100 * report.score(alice, variant).share:.1f}")
            cells.append(f"{100 * difference.share:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})")
        lines.append(f"| {ALICE_IS_TOLD[alice]} | {' | '.join(cells)} |")
    return lines


def _course_lines(found: TunedReport) -> list[str]:
    """What each adapter took."""
    lines = [
        "| adapter | share of the model | traces | best epoch | steps | held-out loss | held-out score | minutes |"
    ]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, card in found.cards.items():
        before, best = card["untuned"], card["best"]
        lines.append(
            f"| {name} | {card['share_of_model']:.1%} | {card['traces']['traces']} | {card['best_epoch']} | "
            f"{card['steps']} | "
            f"{before['loss']:.3f} to {best['loss']:.3f} | {before['score']:.3f} to {best['score']:.3f} | "
            f"{card['minutes']:.1f} |"
        )
    return lines
