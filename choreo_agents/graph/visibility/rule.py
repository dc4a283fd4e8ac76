"""A rule: how one reader sees one source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import VisibilityError
from choreo_agents.graph.visibility.modes import PRIVATE, REENCODED, SHARED, Channel, Mode, VisibilityMode, mode_of
from choreo_agents.graph.visibility.sources import EVERYONE, START_SOURCE

History = Literal["all", "last"] | int
Scope = Literal["reader", "public"] | tuple[str, ...]
Positions = Literal["sequential", "parallel"]
"""Where the messages of a view stand: one after the other; or those of one superstep at one offset, what follows
starting after the longest of them."""


@refuses_unknown()
@dataclass(frozen=True, init=False)
class Rule:
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

    def narrowed(self, inner: Rule) -> Rule:
        """The rule by which a reader sees by `inner` what is seen by this one: of both the narrower, and the same in
        either order, so that narrowing again and again, as in loops, comes to an end.

        Raises:
            VisibilityError: Both re-word.
        """
        if not (self.mode.shows and inner.mode.shows):
            return inner if self.mode.shows else self
        first, mode = sorted(
            (self.mode, inner.mode), key=lambda each: (each.encodes_again, each.reword is not None, each.name)
        )
        if first.reword not in (None, mode.reword):
            raise VisibilityError(f"{self.mode!r} and {inner.mode!r} both re-word")
        limits = {rule.history for rule in (self, inner)} - {"all"}
        history: History = "all"
        if limits:
            # The last superstep has any number of messages: of that and a number the one that both show.
            history = limits.pop() if len(limits) == 1 else min(1 if each == "last" else each for each in limits)
        scopes = {rule.scope for rule in (self, inner)} - {"reader"} or {"reader"}
        both: Scope = tuple(sorted({*self.contexts} & {*inner.contexts})) or "public"
        return Rule(mode, history, scopes.pop() if len(scopes) == 1 else both)

    def without(self, channel: Channel) -> Rule:
        """The rule that lets nothing more of its source through a channel: encodings are cut by encoding words again,
        words by leaving the source out."""
        return Rule(REENCODED, self.history) if channel == "encoding" else Rule(PRIVATE)


def _scope(scope: Scope | Sequence[str]) -> Scope:
    if scope in ("reader", "public"):
        return scope
    named = tuple(scope) if isinstance(scope, list | tuple) else ()
    if not named or not all(isinstance(name, str) and name for name in named):
        raise VisibilityError(f"scope must be 'reader', 'public' or a list of private contexts, not {scope!r}")
    return named


Reads = Mapping[str, Mode | Rule] | Literal["*"]
"""Sources of one reader, in the order in which it sees those of one superstep. `"*"` are all that are not named, and
then those of one superstep stand in the order of their names, as LangGraph applies what they say; alone it is short for
`{"*": "shared"}`."""


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
    return Rule(
        SHARED if spelling is None else spelling,
        "all" if history is None else history,
        "reader" if scope is None else scope,
    )


def rules_of(reads: Reads) -> dict[str, Rule]:
    """Spelled-out rules of a `reads=` argument.

    Raises:
        VisibilityError: It is neither `"*"` nor says how each of its sources is read.
    """
    if reads == EVERYONE:
        return {EVERYONE: Rule()}
    if not isinstance(reads, Mapping):
        raise VisibilityError(
            f"reads must be '*', or a mode or Rule for each source, such as {{'pro': 'shared'}}: not {reads!r}"
        )
    return {source: rule_of(rule) for source, rule in reads.items()}


def hidden_sources(rules: Mapping[str, Rule]) -> frozenset[str]:
    """The sources of which nothing is to reach a reader as an encoding, through whomever."""
    return frozenset(source for source, rule in rules.items() if rule.mode.keeps_out)
