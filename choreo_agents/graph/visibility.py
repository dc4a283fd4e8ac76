"""Visibility: the modes in which one node sees another, rules made of them, and the table of all declarations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import VisibilityError

# Modes: how a reader sees a source. Code checks a mode's properties, never its name: users add modes of their own


ModeName = Literal["private", "shared", "reencoded"]
Channel = Literal["encoding", "words"]
"""The form in which private text reaches a reader: KV that attended to it, or words decoded from it that were encoded
again or routed on."""
Presence = Literal["text"] | Channel
"""The form in which a node has a context: it writes the very text; it attends to KV of it, or to KV that attended to
it; or it has words that may have been decoded from it."""

_HOPS = ("own", "state", "called")
"""Labels of an audit's hops that follow no rule."""


@dataclass(frozen=True, repr=False)
class VisibilityMode:
    """A way in which a reader sees a source.

    Three modes have names: `shared`, `reencoded` and `private`. Make others as you need them, and give them wherever a
    mode is declared: `visibility=VisibilityMode("first sentence", "words", transform=first_sentence)`.

    Raises:
        VisibilityError: The name cannot be drawn, or it transforms or keeps out a source that it shows otherwise.
    """

    name: str
    """Words that label it on edges, in reports and in errors."""
    attends_to: Literal["encoding", "words", "nothing"]
    """What the reader attends to: the source's own encoding, and with it all that this attended to; a fresh encoding of
    the source's text; or nothing."""
    transform: Callable[[str], str] | None = None
    """Returns the text to encode for the reader, given a message's text: a summary, a redaction. It runs on the event
    loop, and must be deterministic. What it leaves of a private text cannot be proven: audits count the result as the
    text. None: the text as it is."""
    keeps_out: bool = False
    """Whether no encoding that descends from the source may reach the reader through others either: a promise that
    audits and calls enforce."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"\w[\w '-]*", self.name):
            raise VisibilityError(f"a mode's name must consist of letters, digits, spaces, ' and -, not {self.name!r}")
        if self.name in _HOPS:
            raise VisibilityError(f"the mode name {self.name!r} is reserved for audits: choose another name")
        if self.attends_to not in ("encoding", "words", "nothing"):
            raise VisibilityError(
                f"attends_to of mode {self.name!r} must be 'encoding', 'words' or 'nothing', not {self.attends_to!r}"
            )
        if self.transform is not None and not self.encodes_again:
            raise VisibilityError(f"mode {self.name!r} has a transform: it must attend to 'words'")
        if self.keeps_out and self.shows:
            raise VisibilityError(f"mode {self.name!r} cannot show a source and keep it out")

    def __repr__(self) -> str:
        return repr(self.name)

    @property
    def shows(self) -> bool:
        """True if the reader sees anything of the source."""
        return self.attends_to != "nothing"

    @property
    def shares_kv(self) -> bool:
        """True if the reader attends to the source's own encodings."""
        return self.attends_to == "encoding"

    @property
    def encodes_again(self) -> bool:
        """True if the reader attends to a fresh encoding of the source's text."""
        return self.attends_to == "words"

    def opens(self, presence: Presence) -> tuple[Channel, ...]:
        """Return the channels through which what the source has reaches the reader.

        A fresh encoding of a text opens both: it is KV of the text, and has its words.
        """
        if not self.shows:
            return ()
        if presence == "words":
            return ("words",)
        if self.shares_kv:
            return ("encoding",)
        return ("encoding", "words") if presence == "text" else ("words",)

    def narrowed(self, to: VisibilityMode) -> VisibilityMode | None:
        """Return the mode for a message that a `send` hands on as `to`; None: that would be more than this mode
        shows."""
        if not self.shows or not to.shows or (to.shares_kv and not self.shares_kv):
            return None
        return to if self.shares_kv and not to.shares_kv else self

    def apply(self, words: str) -> str:
        """Return a message's text as the reader gets it.

        Raises:
            VisibilityError: The transform returns no text.
        """
        text = words if self.transform is None else self.transform(words)
        if not isinstance(text, str):
            raise VisibilityError(f"mode {self.name!r} must return text, not {type(text).__name__}")
        return text


SHARED = VisibilityMode("shared", "encoding")
REENCODED = VisibilityMode("reencoded", "words")
PRIVATE = VisibilityMode("private", "nothing", keeps_out=True)
UNSEEN = VisibilityMode("unseen", "nothing")
"""Mode of a source that is not in the view, without a promise about what reaches the reader through others."""
_NAMED = {mode.name: mode for mode in (PRIVATE, SHARED, REENCODED)}

Mode = ModeName | VisibilityMode
"""A mode as it is declared: a name or a `VisibilityMode`."""


def mode_of(spelling: str | VisibilityMode) -> VisibilityMode:
    """Return the declared mode.

    Raises:
        VisibilityError: No mode has that name, or a different mode has it.
    """
    if isinstance(spelling, VisibilityMode):
        if _NAMED.get(spelling.name, spelling) != spelling:
            raise VisibilityError(f"there is another visibility mode {spelling.name!r}: choose another name")
        return spelling
    mode = _NAMED.get(spelling) if isinstance(spelling, str) else None
    if mode is None:
        names = ", ".join(map(repr, _NAMED))
        raise VisibilityError(f"unknown visibility {spelling!r}: use one of {names}, or a VisibilityMode")
    return mode


# Sources: names of authors in a reader's own graph

START_SOURCE = "__start__"
"""The source of input text: LangGraph's START."""
EVERYONE = "*"
"""Every node of a reader's graph without a declaration of its own, except its confidential messages."""
OUTSIDE = "||"
"""Prefix of a source's path outside of a reader's graph; no node can have this name."""


def source_in(rules: Mapping[str, Any], author: str, reader: str) -> str | None:
    """Return the source that an author is to a reader's rules, also outside of its graph if a rule names it."""
    if (source := source_of_author(author, reader)) is not None:
        return source
    parts = author.split("|")
    names = (OUTSIDE + "|".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((name for name in names if name in rules), None)


def source_of_author(author: str, reader: str) -> str | None:
    """Return the source that an author is in a reader's own graph: a node, START, or None for an author outside.

    To `closer`, all messages of `team|pro` and `team|judge` come from the node `team`. To `team|judge`, messages of
    `pro` outside have no source that its graph could declare.
    """
    if author == START_SOURCE:
        return author
    path, home = author.split("|"), reader.split("|")[:-1]
    return path[len(home)] if path[: len(home)] == home and len(path) > len(home) else None


# Rules: how one reader sees one source

History = Literal["all", "last"] | int
Scope = Literal["reader", "public"] | tuple[str, ...]
Positions = Literal["sequential", "parallel"]
"""Positions of a view's messages: one after the other; or those of one superstep at one position, what follows starting
after the longest of them."""


@refuses_unknown()
@dataclass(frozen=True, init=False)
class VisibilityRule:
    """Rule by which one reader sees one source.

    Args:
        mode: `shared`: the source's own encodings. `reencoded`: a fresh encoding of its text. `private`: nothing, and
            no encoding that descends from it either. Or a `VisibilityMode` of yours.
        history: All its messages, those of its last superstep, or of its last k.
        scope: The context that a fresh encoding attends to: the reader's view so far, as in ordinary prompting; the
            `public` root alone, once for all such readers; or the root and named private contexts, such as
            `("alice.system",)`.

    Raises:
        VisibilityError: There is no such mode, history or scope.
    """

    mode: VisibilityMode
    history: History
    scope: Scope

    def __init__(self, mode: Mode = SHARED, history: History = "all", scope: Scope | Sequence[str] = "reader") -> None:
        meant = mode_of(mode)
        counted = isinstance(history, int) and not isinstance(history, bool) and history >= 1
        if history not in ("all", "last") and not counted:
            raise VisibilityError(f"history must be 'all', 'last' or a number of 1 or more, not {history!r}")
        named = _check_scope(scope)
        if named != "reader" and not meant.encodes_again:
            raise VisibilityError(f"scope {named!r} applies to text that is encoded again, but {meant!r} encodes none")
        for name, value in (("mode", meant), ("history", history), ("scope", named)):
            object.__setattr__(self, name, value)

    @property
    def contexts(self) -> tuple[str, ...]:
        """The private contexts that fresh encodings attend to."""
        return self.scope if isinstance(self.scope, tuple) else ()

    def words(self) -> str:
        """Return the rule as an edge's label."""
        label = self.mode.name
        if self.scope != "reader":
            label += f" in {self.scope if self.scope == 'public' else ', '.join(self.contexts)}"
        if self.history == "all" or not self.mode.shows:
            return label
        return f"{label}, last" if self.history == "last" else f"{label}, last {self.history}"

    def narrowed(self, inner: VisibilityRule) -> VisibilityRule:
        """Return the narrower of this rule and `inner`: for a reader that sees by `inner` what is seen by this rule.

        It is the same in either order, so that repeated narrowing, as in loops, reaches a fixed point.

        Raises:
            VisibilityError: Both transform text.
        """
        if not (self.mode.shows and inner.mode.shows):
            return inner if self.mode.shows else self
        first, mode = sorted((self.mode, inner.mode), key=lambda m: (m.encodes_again, m.transform is not None, m.name))
        if first.transform not in (None, mode.transform):
            raise VisibilityError(f"{self.mode!r} and {inner.mode!r} both transform the text")
        limits = {rule.history for rule in (self, inner)} - {"all"}
        history: History = "all"
        if limits:
            # "last" and a number differ: both show at least the last superstep, so "last" counts as 1.
            history = limits.pop() if len(limits) == 1 else min(1 if limit == "last" else limit for limit in limits)
        scopes = {rule.scope for rule in (self, inner)} - {"reader"} or {"reader"}
        both: Scope = tuple(sorted({*self.contexts} & {*inner.contexts})) or "public"
        return VisibilityRule(mode, history, scopes.pop() if len(scopes) == 1 else both)

    def without(self, channel: Channel) -> VisibilityRule:
        """Return the rule with one channel cut: encodings by encoding text again, words by hiding the source."""
        return VisibilityRule(REENCODED, self.history) if channel == "encoding" else VisibilityRule(PRIVATE)


def _check_scope(scope: Scope | Sequence[str]) -> Scope:
    if scope in ("reader", "public"):
        return scope
    named = tuple(scope) if isinstance(scope, list | tuple) else ()
    if not named or not all(isinstance(name, str) and name for name in named):
        raise VisibilityError(f"scope must be 'reader', 'public' or a list of private contexts, not {scope!r}")
    return named


Reads = Mapping[str, Mode | VisibilityRule] | Literal["*"]
"""Sources of one reader, in the order in which messages of one superstep are shown.

`"*"` are all that are not named; messages of one superstep are then ordered by name, as LangGraph applies updates.
Alone it is short for `{"*": "shared"}`.
"""


def with_input(rules: Mapping[str, VisibilityRule]) -> dict[str, VisibilityRule]:
    """Return a reader's rules with one for input: shared, unless declared otherwise."""
    return {START_SOURCE: VisibilityRule(), **rules}


def rule_of(
    spelling: Mode | VisibilityRule | None, history: History | None = None, scope: Scope | Sequence[str] | None = None
) -> VisibilityRule:
    """Return the rule for a mode, a `VisibilityRule`, or None for the default.

    Raises:
        VisibilityError: It is neither, or a history or scope is given twice.
    """
    if isinstance(spelling, VisibilityRule):
        for name, value in (("history", history), ("scope", scope)):
            if value is not None:
                raise VisibilityError(f"{name} {value!r} conflicts with {spelling}: set it in the VisibilityRule")
        return spelling
    mode = SHARED if spelling is None else spelling
    return VisibilityRule(mode, "all" if history is None else history, "reader" if scope is None else scope)


def rules_of(reads: Reads) -> dict[str, VisibilityRule]:
    """Return the rules of a `reads=` argument.

    Raises:
        VisibilityError: It is neither `"*"` nor a mode or rule for each source.
    """
    if reads == EVERYONE:
        return {EVERYONE: VisibilityRule()}
    if not isinstance(reads, Mapping):
        raise VisibilityError(
            f"reads must be '*', or a mode or VisibilityRule per source, such as {{'pro': 'shared'}}: not {reads!r}"
        )
    return {source: rule_of(rule) for source, rule in reads.items()}


def private_in(rules: Mapping[str, VisibilityRule]) -> frozenset[str]:
    """Return the sources of which no encoding may reach the reader, not even through others."""
    return frozenset(source for source, rule in rules.items() if rule.mode.keeps_out)


# The table of all declarations

RuleOrigin = Literal["edge", "history", "changed", "pair"]
"""Where the rule of a pair comes from: an edge that declares nothing; a declared history without a mode; a policy; or a
declaration of the pair."""


@dataclass
class VisibilityTable:
    """All declarations: rules by reader and source. Sources keep the order in which they were first declared."""

    rules: dict[str, dict[str, VisibilityRule]] = field(default_factory=dict)
    everyone_rules: dict[str, VisibilityRule] = field(default_factory=dict)
    """For some readers, the rule for all sources that they do not name."""
    default: VisibilityRule | None = None
    """The rule for all other pairs without a declaration; None: they see nothing, except over edges."""
    silent: set[str] = field(default_factory=set)
    """Nodes that write no messages: their readers see what they see."""
    _confidential: set[str] = field(default_factory=set)
    """Nodes whose messages silent nodes do not pass on."""
    _instructed: dict[str, str] = field(default_factory=dict)
    """Persona by node, for nodes with a system prompt: an edge from START shows them input behind that prompt."""
    _origins: dict[tuple[str, str], RuleOrigin] = field(default_factory=dict)
    """Where each pair's rule comes from, by (source, reader)."""
    _seen: dict[str, dict[str, VisibilityRule]] | None = None
    """Cache of `seen`; None: not computed."""

    def copy(self) -> VisibilityTable:
        """Return an independent table with the same rules."""
        rules = {reader: dict(rules) for reader, rules in self.rules.items()}
        nodes = set(self.silent), set(self._confidential), dict(self._instructed)
        return VisibilityTable(rules, dict(self.everyone_rules), self.default, *nodes, dict(self._origins), self._seen)

    def describe(
        self, *, silent: Iterable[str] = (), confidential: Iterable[str] = (), personas: Mapping[str, str] | None = None
    ) -> None:
        """Record properties of nodes that matter for visibility.

        Args:
            silent: Nodes that write no messages.
            confidential: Nodes whose messages are confidential.
            personas: Personas of nodes with a system prompt, by node.
        """
        self._seen = None
        self.silent.update(silent)
        self._confidential.update(confidential)
        self._instructed.update(personas or {})

    def declare(
        self, source: str, reader: str, rule: VisibilityRule, *, explicit: bool = True, has_mode: bool = True
    ) -> None:
        """Set how `reader` sees `source`. Explicit declarations override rules for everyone, and these override edges'
        defaults.

        Raises:
            VisibilityError: Two explicit declarations of the pair differ, or source and reader are the same.
        """
        _require_pair(source, reader)
        if source == EVERYONE:
            _require_same(source, reader, self.everyone_rules.setdefault(reader, rule), rule)
            return
        self._seen, rules = None, self.rules.setdefault(reader, {})
        origin: RuleOrigin = "edge" if not explicit else "pair" if has_mode else "history"
        if self._is_explicit(source, reader):
            if explicit:
                _require_same(source, reader, rules[source], rule)
            if origin != "pair":
                return
        # A pair that a policy has changed overrides the rule for everyone, also if an edge declares it anew.
        is_changed = origin == "edge" and self._origins.get((source, reader)) == "changed"
        rules[source], self._origins[source, reader] = rule, "changed" if is_changed else origin

    def change(self, source: str, reader: str, rule: VisibilityRule, *, explicit: bool = False) -> None:
        """Replace a declaration, whoever made it; `explicit`: the new one counts as declared for this very pair.

        Raises:
            VisibilityError: Source and reader are the same.
        """
        _require_pair(source, reader)
        if source == EVERYONE:
            self.everyone_rules[reader] = rule
            return
        self._seen, self.rules.setdefault(reader, {})[source] = None, rule
        is_pair = explicit or self._is_explicit(source, reader)
        self._origins[source, reader] = "pair" if is_pair else "changed"

    def everyone(self, reader: str) -> VisibilityRule | None:
        """Return a reader's rule for all sources that it does not name; None: it sees nothing of them."""
        return self.everyone_rules.get(reader, self.default)

    def reads(self, reader: str, nodes: Iterable[str] = ()) -> dict[str, VisibilityRule]:
        """Return a reader's rules by source, input included, and all of `nodes` if it sees everyone."""
        rules, rule = self.seen.get(reader, {}), self.everyone(reader)
        if rule is None:
            return with_input(rules)
        named = {source: own for source, own in rules.items() if self._overrides(source, reader)}
        return with_input({**dict.fromkeys(self.undeclared(reader, nodes) or (), rule), **named})

    def undeclared(self, reader: str, nodes: Iterable[str] = ()) -> tuple[str, ...] | None:
        """Return the sources among `nodes`, and at the starts of its edges, that a reader sees without a declaration;
        by name.

        None: it does not see everyone.
        """
        if self.everyone(reader) is None:
            return None
        sources = {*nodes, *self.rules.get(reader, {})} - {reader, START_SOURCE}
        return tuple(sorted(source for source in sources if not self._is_explicit(source, reader)))

    def declared(self, nodes: Iterable[str]) -> dict[str, dict[str, VisibilityRule]]:
        """Return the declarations, by reader and source; for `nodes` also the default, as source `EVERYONE`."""
        table: dict[str, dict[str, VisibilityRule]] = {}
        for reader in {**self.seen, **self.everyone_rules, **dict.fromkeys(nodes if self.default is not None else ())}:
            rule, rules = self.everyone(reader), self.seen.get(reader, {})
            table[reader] = dict(rules)
            if rule is not None:
                table[reader] = {s: own for s, own in rules.items() if self._overrides(s, reader)} | {EVERYONE: rule}
        return table

    @property
    def seen(self) -> dict[str, dict[str, VisibilityRule]]:
        """Rules by reader and source, with those that follow from properties of nodes where nothing else is declared.

        Silent nodes pass on what they see. Of several paths the narrowest rule holds; if one path is private, the
        source is not in the view, without a promise. Input, which everyone sees, and confidential messages are not
        passed on. Behind an edge from START input is encoded again after a system prompt, in all views of a persona.

        Raises:
            VisibilityError: Two paths transform a source's text differently.
        """
        if self._seen is None:
            passed: dict[str, dict[str, VisibilityRule]] = {}
            before = None
            while passed != before:  # fixed point: silent nodes may be in a loop, each round of which narrows the rules
                before, passed = passed, {name: self._narrowest(name, passed) for name in sorted(self.silent)}
            self._seen = {**self.rules}
            for reader in self.rules.keys() - self.silent:
                if self.everyone(reader) is None:
                    self._seen[reader] = self._narrowest(reader, passed)
            first = {persona for name, persona in self._instructed.items() if self._is_default(START_SOURCE, name)}
            for name, persona in self._instructed.items():
                rule = self.rules.get(name, {}).get(START_SOURCE)
                is_open = rule is None or self._is_default(START_SOURCE, name)
                if persona in first and is_open and self.everyone(name) is None:
                    again = VisibilityRule(REENCODED, "all" if rule is None else rule.history)
                    self._seen[name] = {**self._seen.get(name, {}), START_SOURCE: again}
        return self._seen

    def _narrowest(self, reader: str, passed: Mapping[str, Mapping[str, VisibilityRule]]) -> dict[str, VisibilityRule]:
        """Return a reader's rules, with those for sources that silent nodes pass on in the places of these nodes; for a
        silent reader only what it passes on itself."""
        result: dict[str, VisibilityRule] = {}
        rules, is_silent = self.rules.get(reader, {}), reader in self.silent
        declared = {reader, *(source for source in rules if not is_silent or self._is_explicit(source, reader))}
        for source, rule in rules.items():
            passed_rules = passed.get(source, {}) if source in self.silent else {}
            if is_silent and source not in {*self.silent, *self._confidential, START_SOURCE}:
                passed_rules = {source: rule}
            for name, passed_rule in passed_rules.items():
                if name in declared and name != source:
                    continue
                try:
                    narrowed = passed_rule if passed_rule == rule else passed_rule.narrowed(rule)
                    if result.get(name, narrowed) != narrowed:
                        narrowed = narrowed.narrowed(result[name])
                except VisibilityError as error:
                    raise VisibilityError(
                        f"how {reader!r} sees {name!r} through {source!r} is ambiguous: {error}. Declare this pair"
                    ) from error
                result[name] = narrowed if narrowed.mode.shows else VisibilityRule(UNSEEN)
            if not is_silent:
                result[source] = rule
        return result

    def _is_default(self, source: str, reader: str) -> bool:
        """Return whether a pair is declared only by an edge without a mode."""
        return self._origins.get((source, reader)) in ("edge", "history")

    def _overrides(self, source: str, reader: str) -> bool:
        """Return whether a pair's declaration overrides the rule for everyone."""
        return self._origins.get((source, reader), "edge") != "edge"

    def _is_explicit(self, source: str, reader: str) -> bool:
        """Return whether a rule was declared for this very pair."""
        return self._origins.get((source, reader)) in ("history", "pair")

    def explicit(self) -> Iterator[tuple[str, str, VisibilityRule]]:
        """Yield every (source, reader, rule) that was declared for this very pair."""
        return (declared for declared in self._rules() if self._is_explicit(*declared[:2]))

    def require_nodes(self, nodes: Iterable[str]) -> None:
        """Raise `VisibilityError` if a declaration names no node."""
        names = set(nodes)
        for source, reader, _ in self._rules():
            for name, allowed in ((reader, names), (source, names | {START_SOURCE, EVERYONE})):
                if name not in allowed:
                    raise VisibilityError(
                        f"the visibility of {source!r} to {reader!r} names {name!r}, which is not a node. Nodes: "
                        f"{', '.join(sorted(names))}"
                    )

    def require_contexts(self, contexts: Iterable[str]) -> None:
        """Raise `VisibilityError` if a scope names no private context whose text the graph's own agents have."""
        names = set(contexts)
        everyone = [] if self.default is None else [(EVERYONE, EVERYONE, self.default)]
        for source, reader, rule in (*self._rules(), *everyone):
            for name in rule.contexts:
                if name not in names:
                    choices = f"there are {', '.join(map(repr, sorted(names)))}" if names else "the graph has none"
                    raise VisibilityError(
                        f"the scope of the visibility of {source!r} to {reader!r} names {name!r}, which is not a "
                        f"private context: {choices}"
                    )

    def _rules(self) -> Iterator[tuple[str, str, VisibilityRule]]:
        """Yield every (source, reader, rule) with a named reader; source `EVERYONE` for rules for everyone."""
        for reader, rules in self.rules.items():
            yield from ((source, reader, rule) for source, rule in rules.items())
        yield from ((EVERYONE, reader, rule) for reader, rule in self.everyone_rules.items())


def rule_between(table: Mapping[str, Mapping[str, VisibilityRule]], source: str, reader: str) -> VisibilityRule | None:
    """Return the rule for a pair of nodes in a table of declarations; None: there is none."""
    rules = table.get(reader, {})
    return rules.get(source, None if source == START_SOURCE else rules.get(EVERYONE))


def _require_pair(source: str, reader: str) -> None:
    if source == reader:
        raise VisibilityError(f"{reader!r} always sees its own messages: leave this rule out")


def _require_same(source: str, reader: str, declared: VisibilityRule, rule: VisibilityRule) -> None:
    """Raise `VisibilityError` if a pair is declared in two ways."""
    if declared != rule:
        raise VisibilityError(
            f"the visibility of {source!r} to {reader!r} is declared twice: {declared} and {rule}. Keep one of them"
        )
