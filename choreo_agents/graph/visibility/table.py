"""Who may see what of whom: declarations, as one plain-data table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.visibility.modes import REENCODED, UNSEEN
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
    silent: set[str] = field(default_factory=set)
    """Nodes that say nothing: their readers see what they see."""
    _confidential: set[str] = field(default_factory=set)
    """Nodes of which no silent one passes anything on."""
    _told: dict[str, str] = field(default_factory=dict)
    """By nodes that have a system prompt, whose they are: behind an edge from START they read input after that."""
    _explicit: set[tuple[str, str]] = field(default_factory=set)
    _modeless: set[tuple[str, str]] = field(default_factory=set)
    """Explicit pairs of which a history is said, but no mode."""
    _changed: set[tuple[str, str]] = field(default_factory=set)
    _seen: dict[str, dict[str, Rule]] | None = None
    """What `seen` has found; None: nothing yet."""

    def copy(self) -> VisibilityTable:
        """A table of its own with the same rules."""
        rules = {reader: dict(rules) for reader, rules in self.rules.items()}
        nodes = set(self.silent), set(self._confidential), dict(self._told)
        pairs = set(self._explicit), set(self._modeless), set(self._changed)
        return VisibilityTable(rules, dict(self.others), self.default, *nodes, *pairs, self._seen)

    def describe(
        self, *, silent: Iterable[str] = (), confidential: Iterable[str] = (), told: Mapping[str, str] | None = None
    ) -> None:
        """Say what nodes are that matters for what they see, or what is seen of them."""
        self._seen = None
        self.silent.update(silent)
        self._confidential.update(confidential)
        self._told.update(told or {})

    def declare(self, source: str, reader: str, rule: Rule, *, explicit: bool = True, has_mode: bool = True) -> None:
        """Set how `reader` sees `source`. What is explicit beats how it sees everyone, and that an edge's default.

        Raises:
            VisibilityError: Two explicit declarations of the pair differ, or it is no pair.
        """
        _require_pair(source, reader)
        if source == EVERYONE:
            _require_same(source, reader, self.others.setdefault(reader, rule), rule)
            return
        self._seen, rules = None, self.rules.setdefault(reader, {})
        if (source, reader) in self._explicit:
            if explicit:
                _require_same(source, reader, rules[source], rule)
            return
        rules[source] = rule
        if explicit:
            self._explicit.add((source, reader))
        if not has_mode:
            self._modeless.add((source, reader))

    def change(self, source: str, reader: str, rule: Rule, *, explicit: bool = False) -> None:
        """Replace a declaration, whoever made it; `explicit`: by one of this very pair.

        Raises:
            VisibilityError: It is no pair.
        """
        _require_pair(source, reader)
        if source == EVERYONE:
            self.others[reader] = rule
            return
        self._seen, self.rules.setdefault(reader, {})[source] = None, rule
        self._modeless.discard((source, reader))
        (self._explicit if explicit else self._changed).add((source, reader))

    def everyone(self, reader: str) -> Rule | None:
        """How a reader sees all whom it does not name; None: not at all."""
        return self.others.get(reader, self.default)

    def reads(self, reader: str, nodes: Iterable[str] = ()) -> dict[str, Rule]:
        """A reader's sources, input text among them; of `nodes`, it sees all if it sees everyone."""
        rules, rule = self.seen.get(reader, {}), self.everyone(reader)
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
        for reader in {**self.seen, **self.others, **dict.fromkeys(nodes if self.default is not None else ())}:
            rule, rules = self.everyone(reader), self.seen.get(reader, {})
            table[reader] = dict(rules)
            if rule is not None:
                table[reader] = {s: said for s, said in rules.items() if self._stays(s, reader)} | {EVERYONE: rule}
        return table

    @property
    def seen(self) -> dict[str, dict[str, Rule]]:
        """Rules by reader and source, with those that follow from what nodes are, where nothing else is declared.

        Silent nodes pass on what they see. Of several ways the narrowest holds; where one is private the source is not
        in the view, and nothing is promised of it. Input, which everyone sees, and what is confidential are not passed
        on. Behind an edge from START input is encoded again after a system prompt, in all views of a persona.

        Raises:
            VisibilityError: What re-words a source on one way is not what does on another.
        """
        if self._seen is None:
            passed: dict[str, dict[str, Rule]] = {}
            before = None
            while passed != before:  # silent nodes may stand in a loop: ways through that narrow what is passed on
                before, passed = passed, {name: self._narrowest(name, passed) for name in sorted(self.silent)}
            self._seen = {**self.rules}
            for reader in self.rules.keys() - self.silent:
                if self.everyone(reader) is None:
                    self._seen[reader] = self._in_order(reader, self._narrowest(reader, passed), passed)
            first = {who for name, who in self._told.items() if self._is_default(START_SOURCE, name)}
            for name, who in self._told.items():
                rule = self.rules.get(name, {}).get(START_SOURCE)
                is_open = rule is None or self._is_default(START_SOURCE, name)
                if who in first and is_open and self.everyone(name) is None:
                    again = Rule(REENCODED, "all" if rule is None else rule.history)
                    self._seen[name] = {**self._seen.get(name, {}), START_SOURCE: again}
        return self._seen

    def _in_order(
        self, reader: str, given: Mapping[str, Rule], passed: Mapping[str, Mapping[str, Rule]]
    ) -> dict[str, Rule]:
        """Return a reader's rules, and those that it is given where the silent nodes stand that pass them on."""
        ordered: dict[str, Rule] = {}
        for source, rule in self.rules[reader].items():
            ordered |= {name: given[name] for name in passed.get(source, ()) if name in given}
            ordered[source] = rule
        return ordered

    def _narrowest(self, reader: str, passed: Mapping[str, Mapping[str, Rule]]) -> dict[str, Rule]:
        """Return how a reader sees the sources that silent nodes pass on to it; who is silent itself also its own."""
        found: dict[str, Rule] = {}
        rules, is_silent = self.rules.get(reader, {}), reader in self.silent
        declared = {reader, *(source for source in rules if not is_silent or (source, reader) in self._explicit)}
        for source, rule in rules.items():
            ways = passed.get(source, {}) if source in self.silent else {}
            if is_silent and source not in {*self.silent, *self._confidential, START_SOURCE}:
                ways = {source: rule}
            for name, way in ways.items():
                if name in declared and name != source:
                    continue
                try:
                    narrowed = way if way == rule else way.narrowed(rule)
                    if found.get(name, narrowed) != narrowed:
                        narrowed = narrowed.narrowed(found[name])
                except VisibilityError as error:
                    raise VisibilityError(
                        f"what {source!r} passes on of {name!r} to {reader!r} is not clear: {error}. Declare this pair"
                    ) from error
                found[name] = narrowed if narrowed.mode.shows else Rule(UNSEEN)
        return found

    def _is_default(self, source: str, reader: str) -> bool:
        """Whether an edge that says no mode is all that declares a pair."""
        has_mode = self._stays(source, reader) and (source, reader) not in self._modeless
        return source in self.rules.get(reader, {}) and not has_mode

    def _stays(self, source: str, reader: str) -> bool:
        """Whether what is said of a pair goes before what is said of everyone."""
        return (source, reader) in self._explicit or (source, reader) in self._changed

    def explicit(self) -> Iterator[tuple[str, str, Rule]]:
        """Every (source, reader, rule) that was declared of the very pair."""
        return ((source, reader, rule) for source, reader, rule in self._rules() if (source, reader) in self._explicit)

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


def _require_pair(source: str, reader: str) -> None:
    if source == reader:
        raise VisibilityError(f"{reader!r} always sees its own messages: leave the rule out")


def _require_same(source: str, reader: str, declared: Rule, rule: Rule) -> None:
    """Raise `VisibilityError` if how a reader sees a source is declared in two ways."""
    if declared != rule:
        raise VisibilityError(
            f"how {reader!r} sees {source!r} is declared twice: {declared} and {rule}. Keep one of them"
        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
