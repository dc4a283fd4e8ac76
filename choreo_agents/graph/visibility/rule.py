"""Who may see what of whom: declarations, as one plain-data table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from choreo_agents.errors import VisibilityError

Mode = Literal["private", "shared", "reencoded"]
History = Literal["all", "last"] | int
Scope = Literal["reader", "public"] | tuple[str, ...]
Positions = Literal["sequential", "parallel"]
"""Where the messages of a view stand: one after the other; or those of one superstep at one offset, what follows
starting after the longest of them."""

START_SOURCE = "__start__"
"""The source of input text: LangGraph's START."""


def source_of_author(author: str, reader: str) -> str | None:
    """An author as a reader's own graph knows it: a node of it, START, or None for one outside of it.

    To `closer`, all that `team|pro` and `team|judge` said comes from the node `team`. To `team|judge`, what `pro`
    outside said has no source that its graph could declare.
    """
    if author == START_SOURCE:
        return author
    path, home = author.split("|"), reader.split("|")[:-1]
    return path[len(home)] if path[: len(home)] == home and len(path) > len(home) else None


@dataclass(frozen=True)
class Rule:
    """How one reader sees one source.

    `shared`: its own encodings. `reencoded`: a fresh encoding of its words. `private`: nothing, and no encoding that
    descends from it either.
    """

    mode: Mode = "shared"
    history: History = "all"
    """All its messages, those of its last superstep, or of its last k."""
    scope: Scope = "reader"
    """What a fresh encoding attends to: the reader's view so far, as in ordinary prompting; the `public` root alone,
    once for all such readers; or the root and named private contexts, such as `("alice.system",)`."""

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or self.mode not in get_args(Mode):
            raise VisibilityError(f"there is no visibility {self.mode!r}: use one of {_quoted(get_args(Mode))}")
        counted = isinstance(self.history, int) and not isinstance(self.history, bool) and self.history >= 1
        if self.history not in ("all", "last") and not counted:
            raise VisibilityError(f"history must be 'all', 'last' or a number from 1 on, not {self.history!r}")
        object.__setattr__(self, "scope", _scope(self.scope))
        if self.scope != "reader" and self.mode != "reencoded":
            raise VisibilityError(f"scope {self.scope!r} says what words are encoded in: {self.mode!r} encodes none")

    @property
    def contexts(self) -> tuple[str, ...]:
        """The private contexts that fresh encodings attend to by name."""
        return self.scope if isinstance(self.scope, tuple) else ()

    def words(self) -> str:
        """The rule as an edge's label."""
        if self.mode == "private":
            return self.mode
        label: str = self.mode
        if self.scope != "reader":
            label += f" in {self.scope if self.scope == 'public' else ', '.join(self.contexts)}"
        if self.history == "all":
            return label
        return f"{label}, last" if self.history == "last" else f"{label}, last {self.history}"


def _scope(scope: Scope | Sequence[str]) -> Scope:
    if scope in ("reader", "public"):
        return scope
    named = tuple(scope) if isinstance(scope, list | tuple) else ()
    if not named or not all(isinstance(name, str) and name for name in named):
        raise VisibilityError(f"scope must be 'reader', 'public' or a list of private contexts, not {scope!r}")
    return named


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


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


def with_input(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """A reader's rules; input text is shared with it unless declared otherwise."""
    return {START_SOURCE: Rule(), **rules}


def rule_of(
    spelling: Mode | Rule | None, history: History | None = None, scope: Scope | Sequence[str] | None = None
) -> Rule:
    """A rule as users spell it: a mode, a `Rule`, or None for the default.

    Raises:
        VisibilityError: It is neither, or a history or scope is given twice.
    """
    if isinstance(spelling, Rule):
        for name, given in (("history", history), ("scope", scope)):
            if given is not None:
                raise VisibilityError(f"{name} {given!r} is given beside {spelling}, which has its own")
        return spelling
    mode = "shared" if spelling is None else spelling
    return Rule(mode, "all" if history is None else history, "reader" if scope is None else _scope(scope))


def rules_of(reads: Reads) -> dict[str, Rule]:
    """Spelled-out rules of a `reads=` argument."""
    return {source: rule_of(rule) for source, rule in reads.items()}
