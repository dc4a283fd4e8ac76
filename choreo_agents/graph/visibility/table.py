"""Who may see what of whom: declarations, as one plain-data table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.visibility.rule import Rule, with_input
from choreo_agents.graph.visibility.sources import START_SOURCE


@dataclass
class VisibilityTable:
    """Rules by reader and source. Sources keep the order in which they were first declared."""

    rules: dict[str, dict[str, Rule]] = field(default_factory=dict)
    _explicit: set[tuple[str, str]] = field(default_factory=set)

    def copy(self) -> VisibilityTable:
        """A table of its own with the same rules."""
        return VisibilityTable({reader: dict(rules) for reader, rules in self.rules.items()}, set(self._explicit))

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

    def change(self, source: str, reader: str, rule: Rule) -> None:
        """Replace a declaration, whoever made it."""
        self.rules.setdefault(reader, {})[source] = rule

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
                        raise VisibilityError(
                            f"the visibility {source!r} to {reader!r} names no node: {name!r}. "
                            f"Nodes: {', '.join(sorted(known))}"
                        )

    def require_contexts(self, contexts: Iterable[str]) -> None:
        """Raise `VisibilityError` if a scope names no private context whose text the graph's own agents have."""
        known = sorted(contexts)
        for reader, rules in self.rules.items():
            for source, rule in rules.items():
                for name in rule.contexts:
                    if name not in known:
                        there = f"there are {_quoted(known)}" if known else "the graph has none"
                        raise VisibilityError(
                            f"the visibility {source!r} to {reader!r} names no private context that words can be "
                            f"encoded in: {name!r}: {there}"
                        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
