"""Who may see what of whom: modes, rules of them, and the table of all rules."""

from choreo_agents.graph.visibility.modes import (
    PRIVATE,
    REENCODED,
    SHARED,
    UNSEEN,
    Channel,
    Mode,
    ModeName,
    Presence,
    VisibilityMode,
    mode_of,
)
from choreo_agents.graph.visibility.rule import (
    History,
    Positions,
    Reads,
    Rule,
    Scope,
    hidden_sources,
    rule_of,
    rules_of,
    with_input,
)
from choreo_agents.graph.visibility.sources import EVERYONE, OUTSIDE, START_SOURCE, source_in, source_of_author
from choreo_agents.graph.visibility.table import VisibilityTable, rule_between

__all__ = [
    "EVERYONE",
    "OUTSIDE",
    "PRIVATE",
    "REENCODED",
    "SHARED",
    "START_SOURCE",
    "UNSEEN",
    "Channel",
    "History",
    "Mode",
    "ModeName",
    "Positions",
    "Presence",
    "Reads",
    "Rule",
    "Scope",
    "VisibilityMode",
    "VisibilityTable",
    "hidden_sources",
    "mode_of",
    "rule_between",
    "rule_of",
    "rules_of",
    "source_in",
    "source_of_author",
    "with_input",
]
