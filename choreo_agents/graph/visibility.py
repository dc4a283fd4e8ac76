"""Who may see what of whom: declarations, as one plain-data table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from choreo_agents.errors import VisibilityError

Mode = Literal["private", "shared", "reencoded"]
History = Literal["all", "last"] | int

START_SOURCE = "__start__"
"""The source of input text: LangGraph's START."""


@dataclass(frozen=True)
class Rule:
    """How one reader sees one source.

    `shared`: its own encodings. `reencoded`: a fresh encoding of its words. `private`: nothing, and no encoding that
    descends from it either. `history`: all its messages, those of its last superstep, or of its last k.
    """

    mode: Mode = "shared"
    history: History = "all"

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or self.mode not in get_args(Mode):
            modes = ", ".join(repr(mode) for mode in get_args(Mode))
            raise VisibilityError(f"there is no visibility {self.mode!r}: use one of {modes}")
        counted = isinstance(self.history, int) and not isinstance(self.history, bool) and self.history >= 1
        if self.history not in ("all", "last") and not counted:
            raise VisibilityError(f"history must be 'all', 'last' or a number from 1 on, not {self.history!r}")


Reads = Mapping[str, Mode | Rule]
"""Sources of one reader, in the order in which it sees those of one superstep."""


@dataclass
class VisibilityTable:
    """Rules by reader and source. Sources keep the order in which they were first declared."""

    rules: dict[str, dict[str, Rule]] = field(default_factory=dict)
    _explicit: set[tuple[str, str]] = field(default_factory=set)

    def declare(self, source: str, reader: str, rule: Rule, *, explicit: bool = True) -> None:
        """Set how `reader` sees `source`. What was said explicitly beats an edge's default.

        Raises:
            VisibilityError: Two explicit declarations of the pair differ, or it is no pair.
        """
        if source == reader:
            raise VisibilityError(f"{reader!r} always sees its own messages: leave the rule out")
        rules = self.rules.setdefault(reader, {})
        if (source, reader) in self._explicit:
            if explicit and rules[source] != rule:
                raise VisibilityError(
                    f"how {reader!r} sees {source!r} is declared twice: {rules[source]} and {rule}. Keep one of them"
                )
            return
        rules[source] = rule
        if explicit:
            self._explicit.add((source, reader))

    def reads(self, reader: str) -> dict[str, Rule]:
        """A reader's sources, input text among them."""
        return with_input(self.rules.get(reader, {}))

    def require_nodes(self, nodes: Iterable[str]) -> None:
        """Raise `VisibilityError` if a declaration names no node."""
        known = set(nodes)
        for reader, rules in self.rules.items():
            for source in rules:
                for name, allowed in ((reader, known), (source, known | {START_SOURCE})):
                    if name not in allowed:
                        names = ", ".join(sorted(known))
                        raise VisibilityError(
                            f"the visibility {source!r} to {reader!r} names no node: {name!r}. Nodes: {names}"
                        )


def with_input(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """A reader's rules; input text is shared with it unless declared otherwise."""
    return {START_SOURCE: Rule(), **rules}


def rule_of(spelling: Mode | Rule | None, history: History | None = None) -> Rule:
    """A rule as users spell it: a mode, a `Rule`, or None for the default.

    Raises:
        VisibilityError: It is neither, or a history is given twice.
    """
    if isinstance(spelling, Rule):
        if history is not None:
            raise VisibilityError(f"history {history!r} is given beside {spelling}, which has its own")
        return spelling
    return Rule("shared" if spelling is None else spelling, "all" if history is None else history)


def rules_of(reads: Reads) -> dict[str, Rule]:
    """Spelled-out rules of a `reads=` argument."""
    return {source: rule_of(rule) for source, rule in reads.items()}
