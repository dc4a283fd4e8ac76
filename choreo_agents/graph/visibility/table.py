"""Who may see what of whom: declarations, as one plain-data table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.visibility.rule import Rule, with_input
from choreo_agents.graph.visibility.sources import EVERYONE, START_SOURCE


@dataclass
class VisibilityTable:
    """Rules by reader and source. Sources keep the order in which they were first declared."""

    rules: dict[str, dict[str, Rule]] = field(default_factory=dict)
    others: dict[str, Rule] = field(default_factory=dict)
    """By reader, how it sees all whom it does not name; it is said of some readers only."""
    default: Rule | None = None
    """How everybody else sees all whom nothing is said of; None: not at all, but over edges."""
    _explicit: set[tuple[str, str]] = field(default_factory=set)
    _changed: set[tuple[str, str]] = field(default_factory=set)

    def copy(self) -> VisibilityTable:
        """A table of its own with the same rules."""
        rules = {reader: dict(rules) for reader, rules in self.rules.items()}
        return VisibilityTable(rules, dict(self.others), self.default, set(self._explicit), set(self._changed))

    def declare(self, source: str, reader: str, rule: Rule, *, explicit: bool = True) -> None:
        """Set how `reader` sees `source`. What is explicit beats how it sees everyone, and that an edge's default.

        Raises:
            VisibilityError: Two explicit declarations of the pair differ, or it is no pair.
        """
        if source == reader:
            raise VisibilityError(f"{reader!r} always sees its own messages: leave the rule out")
        if source == EVERYONE:
            _require_same(source, reader, self.others.setdefault(reader, rule), rule)
            return
        rules = self.rules.setdefault(reader, {})
        if (source, reader) in self._explicit:
            if explicit:
                _require_same(source, reader, rules[source], rule)
            return
        rules[source] = rule
        if explicit:
            self._explicit.add((source, reader))

    def change(self, source: str, reader: str, rule: Rule, *, explicit: bool = False) -> None:
        """Replace a declaration, whoever made it; `explicit`: by one of this very pair."""
        if source == EVERYONE:
            self.others[reader] = rule
            return
        self.rules.setdefault(reader, {})[source] = rule
        (self._explicit if explicit else self._changed).add((source, reader))

    def everyone(self, reader: str) -> Rule | None:
        """How a reader sees all whom it does not name; None: not at all."""
        return self.others.get(reader, self.default)

    def reads(self, reader: str, nodes: Iterable[str] = ()) -> dict[str, Rule]:
        """A reader's sources, input text among them; of `nodes`, it sees all if it sees everyone."""
        rules, rule = self.rules.get(reader, {}), self.everyone(reader)
        if rule is None:
            return with_input(rules)
        named = {source: said for source, said in rules.items() if self._stays(source, reader)}
        return with_input({**dict.fromkeys(self.undeclared(reader, nodes) or (), rule), **named})

    def undeclared(self, reader: str, nodes: Iterable[str] = ()) -> tuple[str, ...] | None:
        """Whom of `nodes`, and at the starts of its edges, it sees though nothing is said of the pair; by name.

        None: it does not see everyone.
        """
        if self.everyone(reader) is None:
            return None
        known = {*nodes, *self.rules.get(reader, {})} - {reader, START_SOURCE}
        return tuple(sorted(source for source in known if (source, reader) not in self._explicit))

    def declared(self, nodes: Iterable[str]) -> dict[str, dict[str, Rule]]:
        """What is declared, by reader and source; for `nodes` as well how they see everyone else, as of `EVERYONE`."""
        table: dict[str, dict[str, Rule]] = {}
        for reader in {**self.rules, **self.others, **dict.fromkeys(nodes if self.default is not None else ())}:
            rule, rules = self.everyone(reader), self.rules.get(reader, {})
            table[reader] = dict(rules)
            if rule is not None:
                table[reader] = {s: said for s, said in rules.items() if self._stays(s, reader)} | {EVERYONE: rule}
        return table

    def _stays(self, source: str, reader: str) -> bool:
        """Whether what is said of a pair goes before what is said of everyone."""
        return (source, reader) in self._explicit or (source, reader) in self._changed

    def require_nodes(self, nodes: Iterable[str]) -> None:
        """Raise `VisibilityError` if a declaration names no node."""
        known = set(nodes)
        for source, reader, _ in self._rules():
            for name, allowed in ((reader, known), (source, known | {START_SOURCE, EVERYONE})):
                if name not in allowed:
                    raise VisibilityError(
                        f"the visibility {source!r} to {reader!r} names no node: {name!r}. "
                        f"Nodes: {', '.join(sorted(known))}"
                    )

    def require_contexts(self, contexts: Iterable[str]) -> None:
        """Raise `VisibilityError` if a scope names no private context whose text the graph's own agents have."""
        known = set(contexts)
        everyone = [] if self.default is None else [(EVERYONE, EVERYONE, self.default)]
        for source, reader, rule in (*self._rules(), *everyone):
            for name in rule.contexts:
                if name not in known:
                    there = f"there are {_quoted(sorted(known))}" if known else "the graph has none"
                    raise VisibilityError(
                        f"the visibility {source!r} to {reader!r} names no private context that words can be "
                        f"encoded in: {name!r}: {there}"
                    )

    def _rules(self) -> Iterator[tuple[str, str, Rule]]:
        """Every (source, reader, rule) that names its reader; of everyone as of `EVERYONE`."""
        for reader, rules in self.rules.items():
            yield from ((source, reader, rule) for source, rule in rules.items())
        yield from ((EVERYONE, reader, rule) for reader, rule in self.others.items())


def rule_between(table: Mapping[str, Mapping[str, Rule]], source: str, reader: str) -> Rule | None:
    """What a table of declarations says of a pair of nodes; None: nothing."""
    rules = table.get(reader, {})
    return rules.get(source, None if source == START_SOURCE else rules.get(EVERYONE))


def _require_same(source: str, reader: str, declared: Rule, rule: Rule) -> None:
    """Raise `VisibilityError` if how a reader sees a source is declared in two ways."""
    if declared != rule:
        raise VisibilityError(
            f"how {reader!r} sees {source!r} is declared twice: {declared} and {rule}. Keep one of them"
        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
