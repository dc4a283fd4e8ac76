"""Who may see what of whom: modes, the rules made of them, and the table of all rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import VisibilityError

# Modes: what a reader has of a source. Whoever wants to know asks the mode; nobody asks for its name


ModeName = Literal["private", "shared", "reencoded"]
Channel = Literal["encoding", "words"]
"""How a private text can reach a reader: through KV that attended to it, or through words decoded from it that were
encoded again or routed on."""
Presence = Literal["text"] | Channel
"""How a node has a context: it says the very text; it attends to KV of it, or that attended to it; it has words that
may have been decoded from it."""

_HOPS = ("own", "state", "called")
"""What stands in an audit's paths where no rule led on."""


@dataclass(frozen=True, repr=False)
class VisibilityMode:
    """What a reader has of a source.

    Three are known by name: `shared`, `reencoded` and `private`. Make others as you need them, and give them wherever a
    mode is declared: `visibility=VisibilityMode("first sentence", "words", transform=first_sentence)`.

    Raises:
        VisibilityError: Its name cannot be drawn, or it re-words, or promises to keep out, what it shows otherwise.
    """

    name: str
    """On edges, in reports and in errors: words."""
    attends_to: Literal["encoding", "words", "nothing"]
    """What the reader attends to: the source's own encoding, and with it all that this attended to; a fresh encoding of
    the source's words; nothing."""
    transform: Callable[[str], str] | None = None
    """Makes of a message's words those that are encoded for the reader: a summary, a redaction. It is called on the
    event loop, and must say the same for the same words. What it leaves of a private text nobody can prove: audits take
    it for the text. None: the words as they are."""
    keeps_out: bool = False
    """Whether no encoding that descends from the source reaches the reader through others either: a promise that
    audits and calls hold the graph to."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"\w[\w '-]*", self.name):
            raise VisibilityError(f"a visibility mode is named by words, which stand on edges, not by {self.name!r}")
        if self.name in _HOPS:
            raise VisibilityError(f"{self.name!r} says in an audit how else a text gets on: give the mode another name")
        if self.attends_to not in ("encoding", "words", "nothing"):
            raise VisibilityError(
                f"mode {self.name!r} must say that its reader attends to 'encoding', 'words' or 'nothing', not to "
                f"{self.attends_to!r}"
            )
        if self.transform is not None and not self.encodes_again:
            raise VisibilityError(f"mode {self.name!r} re-words what is not encoded again: attend to 'words'")
        if self.keeps_out and self.shows:
            raise VisibilityError(f"mode {self.name!r} cannot both show a source and keep it out")

    def __repr__(self) -> str:
        return repr(self.name)

    @property
    def shows(self) -> bool:
        """Whether the reader has anything of the source in its view."""
        return self.attends_to != "nothing"

    @property
    def shares_kv(self) -> bool:
        """Whether the reader attends to the source's own encodings."""
        return self.attends_to == "encoding"

    @property
    def encodes_again(self) -> bool:
        """Whether the reader attends to a fresh encoding of the source's words."""
        return self.attends_to == "words"

    def opens(self, presence: Presence) -> tuple[Channel, ...]:
        """The channels through which what its source has reaches the reader.

        A fresh encoding of a text is both: KV of it, and its words.
        """
        if not self.shows:
            return ()
        if presence == "words":
            return ("words",)
        if self.shares_kv:
            return ("encoding",)
        return ("encoding", "words") if presence == "text" else ("words",)

    def narrowed(self, to: VisibilityMode) -> VisibilityMode | None:
        """What it is for a message that a `send` hands on as `to`; None: that would be more than it shows."""
        if not self.shows or not to.shows or (to.shares_kv and not self.shares_kv):
            return None
        return to if self.shares_kv and not to.shares_kv else self

    def apply(self, words: str) -> str:
        """A message's words as the reader gets them.

        Raises:
            VisibilityError: They are re-worded to something that is no text.
        """
        said = words if self.transform is None else self.transform(words)
        if not isinstance(said, str):
            raise VisibilityError(f"mode {self.name!r} must make words of words, not {type(said).__name__}")
        return said


SHARED = VisibilityMode("shared", "encoding")
REENCODED = VisibilityMode("reencoded", "words")
PRIVATE = VisibilityMode("private", "nothing", keeps_out=True)
UNSEEN = VisibilityMode("unseen", "nothing")
"""Not in the view; of what reaches the reader through others nothing is promised."""
_NAMED = {mode.name: mode for mode in (PRIVATE, SHARED, REENCODED)}

Mode = ModeName | VisibilityMode
"""A mode as it is declared: by name, or itself."""


def mode_of(spelling: str | VisibilityMode) -> VisibilityMode:
    """The mode that is meant.

    Raises:
        VisibilityError: There is none of that name, or another.
    """
    if isinstance(spelling, VisibilityMode):
        if _NAMED.get(spelling.name, spelling) != spelling:
            raise VisibilityError(f"there is another visibility {spelling.name!r}: give yours a name of its own")
        return spelling
    known = _NAMED.get(spelling) if isinstance(spelling, str) else None
    if known is None:
        names = ", ".join(map(repr, _NAMED))
        raise VisibilityError(f"there is no visibility {spelling!r}: use one of {names}, or a VisibilityMode")
    return known


# Sources, as a reader's own graph knows them

START_SOURCE = "__start__"
"""The source of input text: LangGraph's START."""
EVERYONE = "*"
"""Every node of a reader's graph that is not declared otherwise, but for those whose messages are confidential."""
OUTSIDE = "||"
"""Before the path of a source that stands outside of a reader's graph; no node can be named so."""


def source_in(rules: Mapping[str, Any], author: str, reader: str) -> str | None:
    """An author as a reader's rules know it: also one outside of its graph, if a graph around says what it sees."""
    if (source := source_of_author(author, reader)) is not None:
        return source
    parts = author.split("|")
    names = (OUTSIDE + "|".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((name for name in names if name in rules), None)


def source_of_author(author: str, reader: str) -> str | None:
    """An author as a reader's own graph knows it: a node of it, START, or None for one outside of it.

    To `closer`, all that `team|pro` and `team|judge` said comes from the node `team`. To `team|judge`, what `pro`
    outside said has no source that its graph could declare.
    """
    if author == START_SOURCE:
        return author
    path, home = author.split("|"), reader.split("|")[:-1]
    return path[len(home)] if path[: len(home)] == home and len(path) > len(home) else None


# A rule: how one reader sees one source

History = Literal["all", "last"] | int
Scope = Literal["reader", "public"] | tuple[str, ...]
Positions = Literal["sequential", "parallel"]
"""Where the messages of a view stand: one after the other; or those of one superstep at one offset, what follows
starting after the longest of them."""


@refuses_unknown()
@dataclass(frozen=True, init=False)
class VisibilityRule:
    """How one reader sees one source.

    Args:
        mode: What it has of it. `shared`: its own encodings. `reencoded`: a fresh encoding of its words. `private`:
            nothing, and no encoding that descends from it either. Or a `VisibilityMode` of yours.
        history: All its messages, those of its last superstep, or of its last k.
        scope: What a fresh encoding attends to: the reader's view so far, as in ordinary prompting; the `public` root
            alone, once for all such readers; or the root and named private contexts, such as `("alice.system",)`.

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
            raise VisibilityError(f"history must be 'all', 'last' or a number from 1 on, not {history!r}")
        named = _scope(scope)
        if named != "reader" and not meant.encodes_again:
            raise VisibilityError(f"scope {named!r} says what words are encoded in: {meant!r} encodes none")
        for name, value in (("mode", meant), ("history", history), ("scope", named)):
            object.__setattr__(self, name, value)

    @property
    def contexts(self) -> tuple[str, ...]:
        """The private contexts that fresh encodings attend to by name."""
        return self.scope if isinstance(self.scope, tuple) else ()

    def words(self) -> str:
        """The rule as an edge's label."""
        if not self.mode.shows:
            return self.mode.name
        label = self.mode.name
        if self.scope != "reader":
            label += f" in {self.scope if self.scope == 'public' else ', '.join(self.contexts)}"
        if self.history == "all":
            return label
        return f"{label}, last" if self.history == "last" else f"{label}, last {self.history}"

    def narrowed(self, inner: VisibilityRule) -> VisibilityRule:
        """The rule by which a reader sees by `inner` what is seen by this one: of both the narrower, and the same in
        either order, so that narrowing again and again, as in loops, comes to an end.

        Raises:
            VisibilityError: Both re-word.
        """
        if not (self.mode.shows and inner.mode.shows):
            return inner if self.mode.shows else self
        first, mode = sorted(
            (self.mode, inner.mode), key=lambda each: (each.encodes_again, each.transform is not None, each.name)
        )
        if first.transform not in (None, mode.transform):
            raise VisibilityError(f"{self.mode!r} and {inner.mode!r} both re-word")
        limits = {rule.history for rule in (self, inner)} - {"all"}
        history: History = "all"
        if limits:
            # The last superstep has any number of messages: of that and a number the one that both show.
            history = limits.pop() if len(limits) == 1 else min(1 if each == "last" else each for each in limits)
        scopes = {rule.scope for rule in (self, inner)} - {"reader"} or {"reader"}
        both: Scope = tuple(sorted({*self.contexts} & {*inner.contexts})) or "public"
        return VisibilityRule(mode, history, scopes.pop() if len(scopes) == 1 else both)

    def without(self, channel: Channel) -> VisibilityRule:
        """The rule that lets nothing more of its source through a channel: encodings are cut by encoding words again,
        words by leaving the source out."""
        return VisibilityRule(REENCODED, self.history) if channel == "encoding" else VisibilityRule(PRIVATE)


def _scope(scope: Scope | Sequence[str]) -> Scope:
    if scope in ("reader", "public"):
        return scope
    named = tuple(scope) if isinstance(scope, list | tuple) else ()
    if not named or not all(isinstance(name, str) and name for name in named):
        raise VisibilityError(f"scope must be 'reader', 'public' or a list of private contexts, not {scope!r}")
    return named


Reads = Mapping[str, Mode | VisibilityRule] | Literal["*"]
"""Sources of one reader, in the order in which it sees those of one superstep. `"*"` are all that are not named, and
then those of one superstep stand in the order of their names, as LangGraph applies what they say; alone it is short for
`{"*": "shared"}`."""


def with_input(rules: Mapping[str, VisibilityRule]) -> dict[str, VisibilityRule]:
    """A reader's rules; input text is shared with it unless declared otherwise."""
    return {START_SOURCE: VisibilityRule(), **rules}


def rule_of(
    spelling: Mode | VisibilityRule | None, history: History | None = None, scope: Scope | Sequence[str] | None = None
) -> VisibilityRule:
    """A rule as users spell it: a mode, a `VisibilityRule`, or None for the default.

    Raises:
        VisibilityError: It is neither, or a history or scope is given twice.
    """
    if isinstance(spelling, VisibilityRule):
        for name, given in (("history", history), ("scope", scope)):
            if given is not None:
                raise VisibilityError(f"{name} {given!r} is given beside {spelling}, which has its own")
        return spelling
    return VisibilityRule(
        SHARED if spelling is None else spelling,
        "all" if history is None else history,
        "reader" if scope is None else scope,
    )


def rules_of(reads: Reads) -> dict[str, VisibilityRule]:
    """Spelled-out rules of a `reads=` argument.

    Raises:
        VisibilityError: It is neither `"*"` nor says how each of its sources is read.
    """
    if reads == EVERYONE:
        return {EVERYONE: VisibilityRule()}
    if not isinstance(reads, Mapping):
        raise VisibilityError(
            f"reads must be '*', or a mode or Rule for each source, such as {{'pro': 'shared'}}: not {reads!r}"
        )
    return {source: rule_of(rule) for source, rule in reads.items()}


def hidden_sources(rules: Mapping[str, VisibilityRule]) -> frozenset[str]:
    """The sources of which nothing is to reach a reader as an encoding, through whomever."""
    return frozenset(source for source, rule in rules.items() if rule.mode.keeps_out)


# The table of all declarations


@dataclass
class VisibilityTable:
    """Rules by reader and source. Sources keep the order in which they were first declared."""

    rules: dict[str, dict[str, VisibilityRule]] = field(default_factory=dict)
    others: dict[str, VisibilityRule] = field(default_factory=dict)
    """By reader, how it sees all whom it does not name; it is said of some readers only."""
    default: VisibilityRule | None = None
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
    _seen: dict[str, dict[str, VisibilityRule]] | None = None
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

    def declare(
        self, source: str, reader: str, rule: VisibilityRule, *, explicit: bool = True, has_mode: bool = True
    ) -> None:
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
                if has_mode:
                    self._modeless.discard((source, reader))
            return
        rules[source] = rule
        if explicit:
            self._explicit.add((source, reader))
            if not has_mode:
                self._modeless.add((source, reader))

    def change(self, source: str, reader: str, rule: VisibilityRule, *, explicit: bool = False) -> None:
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

    def everyone(self, reader: str) -> VisibilityRule | None:
        """How a reader sees all whom it does not name; None: not at all."""
        return self.others.get(reader, self.default)

    def reads(self, reader: str, nodes: Iterable[str] = ()) -> dict[str, VisibilityRule]:
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

    def declared(self, nodes: Iterable[str]) -> dict[str, dict[str, VisibilityRule]]:
        """What is declared, by reader and source; for `nodes` as well how they see everyone else, as of `EVERYONE`."""
        table: dict[str, dict[str, VisibilityRule]] = {}
        for reader in {**self.seen, **self.others, **dict.fromkeys(nodes if self.default is not None else ())}:
            rule, rules = self.everyone(reader), self.seen.get(reader, {})
            table[reader] = dict(rules)
            if rule is not None:
                table[reader] = {s: said for s, said in rules.items() if self._stays(s, reader)} | {EVERYONE: rule}
        return table

    @property
    def seen(self) -> dict[str, dict[str, VisibilityRule]]:
        """Rules by reader and source, with those that follow from what nodes are, where nothing else is declared.

        Silent nodes pass on what they see. Of several ways the narrowest holds; where one is private the source is not
        in the view, and nothing is promised of it. Input, which everyone sees, and what is confidential are not passed
        on. Behind an edge from START input is encoded again after a system prompt, in all views of a persona.

        Raises:
            VisibilityError: What re-words a source on one way is not what does on another.
        """
        if self._seen is None:
            passed: dict[str, dict[str, VisibilityRule]] = {}
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
                    again = VisibilityRule(REENCODED, "all" if rule is None else rule.history)
                    self._seen[name] = {**self._seen.get(name, {}), START_SOURCE: again}
        return self._seen

    def _in_order(
        self, reader: str, given: Mapping[str, VisibilityRule], passed: Mapping[str, Mapping[str, VisibilityRule]]
    ) -> dict[str, VisibilityRule]:
        """Return a reader's rules, and those that it is given where the silent nodes stand that pass them on."""
        ordered: dict[str, VisibilityRule] = {}
        for source, rule in self.rules[reader].items():
            ordered |= {name: given[name] for name in passed.get(source, ()) if name in given}
            ordered[source] = rule
        return ordered

    def _narrowest(self, reader: str, passed: Mapping[str, Mapping[str, VisibilityRule]]) -> dict[str, VisibilityRule]:
        """Return how a reader sees the sources that silent nodes pass on to it; who is silent itself also its own."""
        found: dict[str, VisibilityRule] = {}
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
                found[name] = narrowed if narrowed.mode.shows else VisibilityRule(UNSEEN)
        return found

    def _is_default(self, source: str, reader: str) -> bool:
        """Whether an edge that says no mode is all that declares a pair."""
        has_mode = self._stays(source, reader) and (source, reader) not in self._modeless
        return source in self.rules.get(reader, {}) and not has_mode

    def _stays(self, source: str, reader: str) -> bool:
        """Whether what is said of a pair goes before what is said of everyone."""
        return (source, reader) in self._explicit or (source, reader) in self._changed

    def explicit(self) -> Iterator[tuple[str, str, VisibilityRule]]:
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
                    there = f"there are {', '.join(map(repr, sorted(known)))}" if known else "the graph has none"
                    raise VisibilityError(
                        f"the visibility {source!r} to {reader!r} names no private context that words can be "
                        f"encoded in: {name!r}: {there}"
                    )

    def _rules(self) -> Iterator[tuple[str, str, VisibilityRule]]:
        """Every (source, reader, rule) that names its reader; of everyone as of `EVERYONE`."""
        for reader, rules in self.rules.items():
            yield from ((source, reader, rule) for source, rule in rules.items())
        yield from ((EVERYONE, reader, rule) for reader, rule in self.others.items())


def rule_between(table: Mapping[str, Mapping[str, VisibilityRule]], source: str, reader: str) -> VisibilityRule | None:
    """What a table of declarations says of a pair of nodes; None: nothing."""
    rules = table.get(reader, {})
    return rules.get(source, None if source == START_SOURCE else rules.get(EVERYONE))


def _require_pair(source: str, reader: str) -> None:
    if source == reader:
        raise VisibilityError(f"{reader!r} always sees its own messages: leave the rule out")


def _require_same(source: str, reader: str, declared: VisibilityRule, rule: VisibilityRule) -> None:
    """Raise `VisibilityError` if how a reader sees a source is declared in two ways."""
    if declared != rule:
        raise VisibilityError(
            f"how {reader!r} sees {source!r} is declared twice: {declared} and {rule}. Keep one of them"
        )
