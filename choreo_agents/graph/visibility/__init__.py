"""Who may see what of whom."""

from choreo_agents.graph.visibility.rule import (
    START_SOURCE,
    History,
    Mode,
    Positions,
    Reads,
    Rule,
    Scope,
    VisibilityTable,
    rule_of,
    rules_of,
    source_of_author,
    with_input,
)

__all__ = [
    "START_SOURCE",
    "History",
    "Mode",
    "Positions",
    "Reads",
    "Rule",
    "Scope",
    "VisibilityTable",
    "rule_of",
    "rules_of",
    "source_of_author",
    "with_input",
]
