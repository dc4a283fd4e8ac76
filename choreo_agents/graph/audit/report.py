"""What an audit says, as typed plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainSerializer,
    PrivateAttr,
    TypeAdapter,
    WrapValidator,
    computed_field,
)

from choreo_agents.graph.visibility import START_SOURCE, Channel
from choreo_agents.tracing import table_html

SENT = "sent"
"""In a hop, before the mode in which a `Send` hands on what a rule shares."""
ACROSS = "across models"
"""In a hop, behind the rule: its reader runs on another model than the source, whose words are encoded again for it."""
ROWS = 200
"""Findings, and lines on what is blocked, that are shown: a large graph has as many as pairs of nodes."""
_TOLD = 3
"""Items that stand in the representation of a listing."""
ContextKind = Literal["system", "message", "module", "thoughts"]


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True)


class Hop(_Plain):
    """One step of a path: who reads whom, and how."""

    source: str
    reader: str
    by: str
    """The rule of the edge; `own` between nodes of one persona, `scope` where a fresh encoding names the context,
    `... across models` where the reader runs on another model, so that words alone go on, `state` where a function
    reads the words in the graph's state, `sent` where a `Send` may hand on words though the rule hands on encodings."""


class PrivateContext(_Plain):
    """A text that not everybody should be influenced by."""

    name: str
    kind: ContextKind
    owners: tuple[str, ...]
    """The nodes that have it in their own views, or say it."""


_WAY = TypeAdapter(tuple[tuple[Hop, ...], tuple[tuple[str, str], ...]])


class Finding(_Plain):
    """A private context can reach, or has reached, a reader."""

    context: str
    reader: str
    """A persona: one node, or all nodes of one speaker."""
    channel: Channel
    violation: str = ""
    """Which promise it breaks; empty if none."""
    _way: tuple[Any, Any] = PrivateAttr()
    """Its path and its cut, or what works them out when somebody asks."""

    def __init__(self, *, path: Any = (), cut: Any = (), **said: Any) -> None:
        super().__init__(**said)
        self._way = (path, cut) if callable(path) else _WAY.validate_python((path, cut))

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def path(self) -> tuple[Hop, ...]:
        """The shortest, from the context on."""
        path: tuple[Hop, ...] = self._way[0]() if callable(self._way[0]) else self._way[0]
        return path

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def cut(self) -> tuple[tuple[str, str], ...]:
        """Edges, as (source, reader): with all of them `reencoded` nothing is left in the encoding channel; for words
        they would have to be undeclared. Empty if nothing of that kind helps."""
        edges: tuple[tuple[str, str], ...] = self._way[1]() if callable(self._way[1]) else self._way[1]
        return edges

    def __reduce__(self) -> tuple[Any, ...]:
        return Finding.model_validate, (self.model_dump(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Finding) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash((self.context, self.reader, self.channel, self.violation))

    def walk(self) -> str:
        """The path in words: `alice.system -> alice =shared=> bob`."""
        steps = [f" -> {hop.reader}" if hop.by == "own" else f" ={hop.by}=> {hop.reader}" for hop in self.path]
        return "".join([self.path[0].source if self.path else self.context, *steps])


class Blocked(_Plain):
    """Two messages of one view, the later of which was encoded without the earlier: ordinary prompting would not."""

    reader: str
    earlier: str
    later: str


Each = TypeVar("Each")


class Row(NamedTuple):
    """Findings of one context through one channel, as a line of a table."""

    context: str
    readers: str
    channel: Channel
    walks: str
    """The paths, one a line, without those that others begin with."""
    cuts: str
    """The edges that would cut them, by reader."""
    is_broken: bool


def _input(source: str) -> str:
    return "input" if source == START_SOURCE else source


class Listing(Sequence[Each]):
    """A sequence whose items are made whenever somebody goes through it: there may be as many as pairs of nodes.

    Args:
        items: These, or what makes them, always the same.
    """

    def __init__(self, items: tuple[Each, ...] | Callable[[], Iterator[Each]]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Each]:
        return iter(self._items if isinstance(self._items, tuple) else self._items())

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)}, and none at {index}")
        return next(islice(self, number, None))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Sequence[Each]) -> tuple[Each, ...]:
        return (*self, *other)

    def __reduce__(self) -> tuple[Any, ...]:
        return Findings if isinstance(self, Findings) else Listing, (tuple(self),)

    @classmethod
    def of(cls, given: Any, check: Callable[[Any], Any]) -> Self:
        """Itself, or what is given in another form."""
        return given if isinstance(given, cls) else cls(tuple(check(given)))

    def __repr__(self) -> str:
        told = [*map(repr, islice(self, _TOLD))]
        return f"({', '.join(told)}{', ...' if len(self) > _TOLD else ''})"


class Findings(Listing[Finding]):
    """What an audit has found."""

    def broken(self) -> Iterator[Finding]:
        """Those that break a promise."""
        return (finding for finding in self if finding.violation)

    def reached(self, reader: str, channel: Channel) -> set[str]:
        """The contexts that reach a reader through a channel."""
        return {each.context for each in self if (each.reader, each.channel) == (reader, channel)}


class AuditReport(_Plain):
    """Who can be influenced by whom, or, of a run, who was.

    There may be as many findings as pairs of nodes: they, their paths and what would cut these are worked out as they
    are asked for.
    """

    contexts: tuple[PrivateContext, ...]
    findings: Annotated[Sequence[Finding], WrapValidator(Findings.of), PlainSerializer(tuple, tuple[Finding, ...])]
    blocked: Annotated[Sequence[Blocked], WrapValidator(Listing.of), PlainSerializer(tuple, tuple[Blocked, ...])] = ()
    outside: tuple[str, ...] = ()
    """What the proof does not cover."""
    changed: tuple[Hop, ...] = ()
    """Edges that the policy has switched to `reencoded`."""

    @property
    def violations(self) -> tuple[Finding, ...]:
        """The findings that break a promise."""
        return tuple(cast(Findings, self.findings).broken())

    @property
    def listed(self) -> Sequence[Finding]:
        """The findings, worst first, without words that get to who may attend to the encoding: these say nothing new,
        unless they break a promise."""
        return Listing(self._listed)

    def _listed(self) -> Iterator[Finding]:
        yield from self.violations
        yield from (each for each in self.findings if each.channel == "encoding" and not each.violation)
        attended: dict[str, set[str]] = {}
        for finding in self.findings:
            if finding.channel == "words" and not finding.violation:
                if finding.reader not in attended:
                    attended[finding.reader] = self.reached(finding.reader, "encoding")
                if finding.context not in attended[finding.reader]:
                    yield finding

    def rows(self, most: int | None = None) -> Iterator[Row]:
        """The findings that are listed, or the first of them, those of one context through one channel together."""
        folded: dict[tuple[object, ...], list[Finding]] = {}
        for each in islice(self.listed, most):
            folded.setdefault((each.context, each.channel, bool(each.violation), bool(each.cut)), []).append(each)
        for findings in folded.values():
            first = findings[0]
            walks = dict.fromkeys(each.walk() for each in findings)
            ways = [walk for walk in walks if not any(other.startswith(f"{walk} ") for other in walks)]
            edges: dict[str, dict[str, None]] = {}
            for source, reader in (edge for each in findings for edge in each.cut):
                edges.setdefault(reader, {})[source] = None
            cuts = [f"{', '.join(sources)} -> {reader}" for reader, sources in edges.items()]
            readers = ", ".join(dict.fromkeys(each.reader for each in findings))
            yield Row(first.context, readers, first.channel, "\n".join(ways), "\n".join(cuts), bool(first.violation))

    def blocked_rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield table rows of what is blocked: the reader, the messages, and what these have not seen."""
        later: dict[tuple[str, str], list[str]] = {}
        for pair in self.blocked:
            later.setdefault((pair.reader, _input(pair.earlier)), []).append(_input(pair.later))
        earlier: dict[tuple[str, str], list[str]] = {}
        for (reader, unseen), messages in later.items():
            earlier.setdefault((reader, ", ".join(messages)), []).append(unseen)
        for (reader, seen), unseen_there in earlier.items():
            yield reader, seen, ", ".join(unseen_there)

    def reached(self, reader: str, channel: Channel) -> set[str]:
        """The contexts that reach a reader through a channel."""
        return cast(Findings, self.findings).reached(reader, channel)

    def _repr_html_(self) -> str:
        rows = ((*row[:4], row.cuts or None, "✗" if row.is_broken else None) for row in self.rows(ROWS))
        columns = ("private context", "can reach", "through", "path", "cut by", "breaks a promise")
        found = table_html(f"who can be influenced by what: {len(self.violations)} promises are broken", columns, rows)
        blocked = islice(self.blocked_rows(), ROWS)
        return found + table_html("encoded without", ("in the view of", "messages", "have not seen"), blocked)
