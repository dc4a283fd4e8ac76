"""Holds a graph to its promises when it is compiled, and tells each reader what to watch when it runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from choreo_agents.errors import VisibilityError, VisibilityWarning
from choreo_agents.graph.audit import (
    AuditReport,
    Chart,
    Declared,
    Finding,
    Guard,
    Hop,
    audit_chart,
    harmless,
    without_answers,
)
from choreo_agents.graph.audit.policy import OnViolation
from choreo_agents.graph.visibility import REENCODED, Channel, Rule, hidden_sources


def kept(chart: Chart, on_violation: OnViolation) -> tuple[Chart, AuditReport]:
    """The chart as it may run, and its audit, with the edges that the policy has changed for that.

    Raises:
        VisibilityError: A path would break a promise, and the policy says `raise`, or nothing but the edge itself
            could be changed.
    """
    changed: Sequence[Hop] = ()
    chart = without_answers(chart)
    if on_violation == "reencode":
        chart, changed = harmless(chart)
    report = audit_chart(chart, changed)
    broken = report.violations
    if broken and on_violation == "warn":
        for finding in broken:
            warnings.warn(said(finding, chart), VisibilityWarning, stacklevel=4)
    elif broken:
        raise VisibilityError("; ".join(said(finding, chart) for finding in broken))
    return chart, report


def said(finding: Finding, chart: Chart) -> str:
    """A violation in words: the private source, the path and the edge to change."""
    what = "an encoding that attended to it" if finding.channel == "encoding" else "words made of it"
    start = f"{finding.violation}, but {what} would get there: {finding.walk()}"
    if not finding.cut:
        return f"{start}. The edge itself contradicts it: remove the edge, or let {finding.reader!r} have it"
    edges = " and ".join(dict.fromkeys(_declared(source, reader) for source, reader in finding.cut))
    if finding.channel == "words" or _keeps_words(finding, chart):
        return f"{start}. Undeclare {edges}"
    return f"{start}. Declare {edges} {REENCODED!r}"


def _declared(source: str, reader: str) -> str:
    """Where a pair is declared: what an agent of a graph sees of a source beside that, over an edge to the graph."""
    beside = "|".join(reader.split("|")[: source.count("|") + 1])
    return f"{source!r} to {beside!r}"


def _keeps_words(finding: Finding, chart: Chart) -> bool:
    """Whether re-encoding would not do: the words must not get there either."""
    return any(
        context.name == finding.context and chart.forbids(context, finding.reader, "words")
        for context in chart.contexts
    )


def guard_of(
    reader: str, persona: str, rules: Mapping[str, Rule], declared: Declared, on_violation: OnViolation
) -> Guard:
    """What one reader's views are checked for at call time."""
    chart = declared.chart
    channels: tuple[Channel, ...] = ("encoding", "words")
    others = [context for context in chart.guarded if reader not in context.owners]
    forbidden: dict[Channel, frozenset[str]] = {
        channel: frozenset(context.name for context in others if chart.forbids(context, persona, channel))
        for channel in channels
    }
    return Guard(hidden_sources(rules), forbidden, on_violation, declared)
